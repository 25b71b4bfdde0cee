// The rows of a timeline: nested, fan-outs folded, done ones hidden; read in pages, and again while the run is live.
import { useEffect, useRef, useState } from "../ui.js";
import { stateName } from "../format.js";
import { pause } from "../queries.js";
import { runPath, source } from "../source.js";
import { millis } from "./timeline_scale.js";

const FAN_OUT = 6; // so many rows in sequence with the same name are folded into one
/** The order in which the states of a group are named: what needs attention comes first. */
const STATES = ["failed", "dead", "timed out", "in doubt", "retrying", "running", "waiting", "pending", "cancelled", "done", "copied"];

/** The key of a step as its author wrote it; null for a position that the journal counts. */
function writtenKey(row) {
  const counted = ["model", "tool", "wait", "approval", "sleep"].includes(row.kind) || /^(0|:\d+|plan\/.*)$/.test(row.key || "");
  return counted ? null : row.key;
}

/** Add times as numbers to a row of the server. */
export function withTimes(row) {
  const attempts = (row.attempts || []).map((each) => ({ ...each, from: millis(each.started_at), to: millis(each.ended_at) }));
  return { ...row, label: row.label || row.name, written: writtenKey(row), state: stateName(row.state), attempts,
    from: millis(row.started_at), to: millis(row.ended_at) };
}

export function isDone(row) {
  return ["done", "copied"].includes(row.state);
}

/** Whether the row may still change: it has no end. */
function isOpen(row) {
  return row.to === null && !isDone(row);
}

/** Children by the id of their parent; rows whose parent is not loaded are roots, under null. */
function childrenOf(rows) {
  const known = new Set(rows.map((row) => row.step_id));
  const children = new Map([[null, []]]);
  for (const row of rows) {
    const parent = row.parent && row.parent !== row.step_id && known.has(row.parent) ? row.parent : null;
    if (!children.has(parent)) children.set(parent, []);
    children.get(parent).push(row);
  }
  return children;
}

/** Split siblings into runs of rows with the same kind and label: [[row, …], …]. */
function runsOf(siblings) {
  const runs = [];
  for (const row of siblings) {
    const last = runs[runs.length - 1];
    if (last && last[0].label === row.label && last[0].kind === row.kind) last.push(row);
    else runs.push([row]);
  }
  return runs;
}

/** What the rows of a group have together: { from, to, open, states: Map(state, rows) }, what needs attention first. */
export function summaryOf(rows) {
  const states = new Map(STATES.map((state) => [state, []]));
  const sum = { from: Infinity, to: -Infinity, open: false };
  for (const row of rows) {
    if (!states.has(row.state)) states.set(row.state, []);
    states.get(row.state).push(row);
    sum.from = Math.min(sum.from, row.from ?? Infinity);
    sum.to = Math.max(sum.to, row.to ?? -Infinity);
    sum.open = sum.open || isOpen(row);
  }
  return { ...sum, states: [...states].filter(([, each]) => each.length) };
}

/**
 * The list that is shown: { type: "row" | "group", id, depth, open, … }.
 *
 * `toggled` holds the ids whose fold differs from the default: groups are folded, but for that of the `selected` row, and
 * rows with children are open. A group has the ids of its first and last row, because it grows at one end.
 */
export function flatten(rows, { toggled, hideDone = false, newest = false, selected = null }) {
  const children = childrenOf(rows);
  const items = [];
  const below = (row) => children.get(row.step_id) || [];
  const shown = (row) => !hideDone || !isDone(row) || below(row).some(shown);
  const isSelected = (row) => row.step_id === selected || below(row).some(isSelected);
  const addRow = (row, depth) => {
    const inside = below(row).filter(shown);
    const open = inside.length > 0 && !toggled.has(row.step_id);
    items.push({ type: "row", id: row.step_id, row, depth, below: inside.length, open });
    if (open) addAll(inside, depth + 1);
  };
  const addAll = (siblings, depth) => {
    const runs = runsOf(siblings);
    for (const run of newest ? runs.reverse() : runs) addRun(run, depth);
  };
  const addRun = (run, depth) => {
    const visible = run.filter(shown);
    if (newest) visible.reverse();
    if (run.length < FAN_OUT) return visible.forEach((row) => addRow(row, depth));
    if (!visible.length) return undefined;
    const ends = [run[0], run[run.length - 1]].map((row) => `+${row.step_id}`);
    const open = ends.some((id) => toggled.has(id)) !== Boolean(selected && run.some(isSelected));
    items.push({ type: "group", id: ends[0], ends, rows: run, name: run[0].label, kind: run[0].kind, depth, open });
    if (open) visible.forEach((row) => addRow(row, depth + 1));
    return undefined;
  };
  addAll(children.get(null), 0);
  return items;
}

// -- The rows of a timeline: read in pages, and read again while the run is live.
const FIRST_PAGE = 200;
const PAGE = 25000; // the most: the server reads the whole journal for each page
const CHANGES_PAGE = 200;
const AUTOMATIC_PAGES = 2; // more are read when the reader scrolls to the end
const PAGES_PER_REFRESH = 10;
const REFRESH = 1500;

/** The rows of one run, in the order of their sequence. */
class Rows {
  byId = new Map();
  sorted = [];
  next = undefined;
  complete = false;

  /** Add rows or replace them; return whether something changed. Rows that are equal stay the same objects. */
  merge(items) {
    let changed = false;
    for (const item of items) {
      const text = JSON.stringify(item);
      const known = this.byId.get(item.step_id);
      if (known && known.text === text) continue;
      this.byId.set(item.step_id, { text, row: withTimes(item) });
      changed = true;
    }
    if (changed) this.sorted = [...this.byId.values()].map(({ row }) => row).sort((a, b) => a.sequence - b.sequence);
    return changed;
  }

  /** The sequence before the first row after `sequence` that has not ended, or else that of the last row. */
  changesAfter(sequence) {
    const open = this.sorted.find((row) => row.sequence > sequence && isOpen(row));
    const last = this.sorted.length ? this.sorted[this.sorted.length - 1].sequence : -1;
    return open ? open.sequence - 1 : Math.max(last, sequence);
  }
}

/** Read what changed: pages from each row that has not ended, and those after the last one. */
async function readChanges(path, rows, signal) {
  let after = rows.changesAfter(-1);
  let changed = false;
  for (let pages = 0; pages < PAGES_PER_REFRESH; pages += 1) {
    const page = await source.get(path, { after: after < 0 ? undefined : after, limit: CHANGES_PAGE }, signal);
    changed = rows.merge(page.items) || changed;
    if (page.next === null || !page.items.length) break;
    after = rows.changesAfter(page.items[page.items.length - 1].sequence);
  }
  return changed;
}

/**
 * Return { rows, total, loading, complete, error, more, reload }. `version` changes when closed rows may have changed, such
 * as after a retry of the run.
 */
export function useRows(runId, { live, newest, version }) {
  const path = runPath(runId, "timeline");
  const [state, setState] = useState({ rows: [], total: null, loading: true, complete: false, error: null });
  const [turn, setTurn] = useState(0);
  const kept = useRef({ store: new Rows(), key: null, followed: false });

  useEffect(() => {
    const abort = new AbortController();
    const { signal } = abort;
    const known = kept.current;
    const key = `${version} ${newest}`;
    if (known.key !== key) Object.assign(known, { key, store: new Rows() });
    const { store } = known;
    const show = (changes) => !signal.aborted && setState((before) => ({ ...before, rows: store.sorted, error: null, ...changes }));
    const readPages = async () => {
      for (let pages = 0; pages < AUTOMATIC_PAGES && !store.complete; pages += 1) {
        const page = await source.get(path, { limit: store.next === undefined ? FIRST_PAGE : PAGE, after: store.next, newest_first: newest ? true : undefined }, signal);
        store.merge(page.items);
        Object.assign(store, { next: page.next, complete: page.next === null });
        show({ total: page.total, loading: false, complete: store.complete });
      }
    };
    const follow = async () => {
      while ((live || known.followed) && !signal.aborted && !source.exported) {
        const began = performance.now();
        try {
          if (!document.hidden && (await readChanges(path, store, signal))) show({});
        } catch (error) {
          show({ error });
        }
        known.followed = live;
        if (!live) break; // it was read once more after the end of the run, for its last changes
        await new Promise((done) => setTimeout(done, pause(REFRESH, began)));
      }
    };
    readPages().then(follow).catch((error) => show({ error, loading: false }));
    return () => abort.abort();
  }, [path, newest, version, live, turn]);

  const again = () => setTurn((before) => before + 1);
  return { ...state, more: () => !state.complete && !state.loading && again(), reload: again };
}
