// A live table of runs with windowed rows, the selection of rows, and bulk actions.
import { html, useEffect, useRef, useState } from "./ui.js";
import { agentName, ago, count, localTime, plural, runName } from "./format.js";
import { href } from "./router.js";
import { isLive } from "./queries.js";
import { Button, Dialog, Empty, Failed, Loading, RunLink, State, Windowed } from "./parts.js";
import { runPath, source } from "./source.js";

const ROW_HEIGHT = 52;
export const REPAIRABLE = ["dead", "failed", "timed_out", "cancelled"];

/** Which rows are selected: { has(run), toggle(run), set(runs), of(runs) }. */
export function useSelection() {
  const [ids, setIds] = useState(new Set());
  return {
    has: (run) => ids.has(run.run_id),
    toggle: (run) =>
      setIds((before) => {
        const after = new Set(before);
        if (!after.delete(run.run_id)) after.add(run.run_id);
        return after;
      }),
    set: (runs) => setIds(new Set(runs.map((run) => run.run_id))),
    of: (runs) => runs.filter((run) => ids.has(run.run_id)),
  };
}

/** The state that a list shows: a failed attempt before the next one is "retrying", as in the filter. */
function shownState(run) {
  if (isLive(run.state) && run.waiting_for.some((name) => name.startsWith("in_doubt:"))) return "in_doubt";
  return run.state === "pending" && run.error ? "retrying" : run.state;
}

export function RunCell({ run }) {
  return html`<span role="cell" class="cell-main"><${RunLink} run=${run} class=${run.key ? "row-link strong" : "row-link mono"} data-row />
    <span class="quiet" title=${agentName(run)}>${agentName(run)}</span></span>`;
}

/** The state, and why the run is there, in one line: all reasons are in its title. */
export function StateCell({ run }) {
  const text = ({ kind, text: words }) => (kind === "due" ? `due ${ago(run.scheduled_at)}` : words);
  return html`<span role="cell" class="cell-state"><${State} state=${shownState(run)} />
    ${run.why.length > 0 && html`<span class="quiet why" title=${run.why.map((each) => each.text).join("\n")}>
      ${run.why.map((each, at) => html`${at > 0 && " · "}${each.run_id
        ? html`<a class="over" href=${href(["runs", each.run_id])}>${text(each)}</a>` : text(each)}`)}</span>`}</span>`;
}

export function AgeCell({ time }) {
  return html`<span role="cell" class="num cell-age" title=${localTime(time)}>${ago(time)}</span>`;
}

function Row({ run, cells, selectable, selected, toggle }) {
  // As `memo` of preact/compat. A cached vnode (useMemo) would keep the rows next to it in memory after they are removed.
  this.shouldComponentUpdate = (next) => ["run", "selected", "minute", "shape"].some((name) => next[name] !== this.props[name]);
  return html`<div role="row" class=${selected ? "table-row selected" : "table-row"}>
    ${selectable && html`<span role="cell" class="cell-check"><input type="checkbox" checked=${selected}
      aria-label=${`Select ${runName(run)}`} onChange=${() => toggle(run)} /></span>`}
    ${cells(run)}
  </div>`;
}

/**
 * The rows of a live list, below what it has to say: that it loads, failed or is empty.
 *
 * `head` is [[label, class, order], …], `cells(run)` the cells of a row, `actions(runs)` the buttons for the selected
 * runs. `sort` is { by, set(by) }, if the columns with an order sort the list. `widths` are those of the last columns.
 */
export function RunTable({ list, head, cells, selection, actions, kind, label, empty, sort = {}, widths = null }) {
  const error = list.error && html`<${Failed} error=${list.error} retry=${() => list.read()} />`;
  if (!list.items.length) return error || (list.loading ? html`<${Loading} />` : html`${empty}<${ListEnd} list=${list} />`);
  const minute = Math.floor(Date.now() / 60000); // the ages
  const shape = head.join(); // the chosen columns
  const row = (run) => html`<${Row} key=${run.run_id} run=${run} cells=${cells} shape=${shape} minute=${minute} selectable=${Boolean(selection)}
    selected=${Boolean(selection) && selection.has(run)} toggle=${selection && selection.toggle} />`;
  const chosen = selection ? selection.of(list.items) : [];
  const all = chosen.length === list.items.length;
  return html`
    ${error}
    <div class=${`table ${kind}`} role="table" aria-label=${label}
      ref=${(element) => element && widths && element.style.setProperty("--more", widths.join(" "))}>
      <div role="rowgroup" class="table-top"><div role="row" class="table-head">
        ${selection && html`<span role="columnheader" class="cell-check"><input type="checkbox" checked=${all}
          aria-label="Select all loaded runs" onChange=${() => selection.set(all ? [] : list.items)} /></span>`}
        ${chosen.length
          ? html`<span role="columnheader" class="selected-bar"><span class="num">${count(chosen.length)} selected</span>
              ${actions(chosen)}<${Button} kind="small" onClick=${() => selection.set([])}>Clear<//></span>`
          : head.map(([text, name, order]) => html`<span key=${text} role="columnheader" class=${name} aria-sort=${order && order === sort.by ? "descending" : null}>
              ${order ? html`<button type="button" class="sort" title=${order === sort.by ? "List the newest first" : "List the greatest first"}
                onClick=${() => sort.set(order === sort.by ? null : order)}>${text}${order === sort.by && html`<span aria-hidden="true"> ↓</span>`}</button>` : text}</span>`)}
      </div></div>
      <${Windowed} items=${list.items} height=${ROW_HEIGHT} row=${row} onEnd=${() => list.more()} role="rowgroup" />
    </div>
    <${ListEnd} list=${list} />`;
}

function ListEnd({ list }) {
  if (list.moreError) return html`<${Failed} error=${list.moreError} retry=${() => list.more(true)} />`;
  if (list.complete) return null;
  if (list.paused) return html`<p class="read-on"><${Button} onClick=${() => list.more(true)}>Read more runs<//></p>`;
  if (!list.full) return html`<${Loading} what="Loading more" />`;
  return html`<${Empty} title=${`The list ends after ${count(MOST_ROWS)} runs.`}>Filter by time, agent or state to find older runs.<//>`;
}

// -- A list of runs that follows the store: pages are loaded on the way down, and the first page is read again and again.
const EVERY = 4000;
const PAGE = 100;
/** Most rows that a list loads, so that its memory is bounded. Older runs are found with a filter. */
const MOST_ROWS = 10000;

// The list that was left last: a person who comes back from a run finds it unchanged.
let kept = null;

/**
 * Return the rows after the first page was read again, newest first. Rows that this page no longer has have left the
 * list; rows below it stay. Without a common row there may be others in between: then only the page is left.
 */
function mergedRows(before, page) {
  const known = new Set(before.map((run) => run.run_id));
  if (page.next === null || !page.items.some((run) => known.has(run.run_id))) return page;
  const inPage = new Set(page.items.map((run) => run.run_id));
  const last = page.items[page.items.length - 1].created_at;
  const below = before.filter((run) => run.created_at <= last && !inPage.has(run.run_id));
  return below.length ? { items: [...page.items, ...below] } : page;
}

class LiveList {
  note = null; // what was not read
  paused = false; // the server has read as many runs as it may: the next page is read if somebody asks for it
  items = [];
  next = undefined;
  loading = true;
  error = null; // of the first page
  moreError = null; // of the next page
  scroll = 0;
  reading = null;

  constructor(key, path, params, live) {
    Object.assign(this, { key, path, live, params: { ...params, limit: PAGE } });
  }

  /** Read now, and every few seconds while the beginning of the list is in sight. Returns a function that ends it. */
  start(redraw) {
    this.redraw = redraw;
    this.again = () => {
      // Nothing moves while a person reads further down.
      if (!document.hidden && (this.loading || (this.live && scrollY < 160))) this.read();
    };
    // Noted while a person scrolls: when this list stops, its rows are removed, and so is the position.
    const scrolled = () => {
      if (document.querySelector(".windowed")) this.scroll = scrollY;
    };
    addEventListener("scroll", scrolled, { passive: true });
    document.addEventListener("visibilitychange", this.again);
    const timer = setInterval(this.again, EVERY);
    this.again();
    return () => {
      removeEventListener("scroll", scrolled);
      document.removeEventListener("visibilitychange", this.again);
      clearInterval(timer);
      if (this.reading) this.reading.abort();
      this.reading = null;
      kept = this;
    };
  }

  get full() {
    return this.items.length >= MOST_ROWS;
  }

  get complete() {
    return this.next === null;
  }

  read() {
    return this.request({}, (page) => Object.assign(this, this.live ? mergedRows(this.items, page) : page), "error");
  }

  more(again = false) {
    if (!this.next || this.full || ((this.moreError || this.paused) && !again)) return;
    const cursor = this.next;
    this.request({ cursor }, (page) => {
      const known = new Set(this.items.map((run) => run.run_id));
      this.items = [...this.items, ...page.items.filter((run) => !known.has(run.run_id))];
      this.next = page.next;
    }, "moreError");
  }

  /** Read a page, one at a time. `field` takes the error. */
  async request(params, take, field) {
    if (this.reading) return;
    const abort = (this.reading = new AbortController());
    try {
      const page = await source.get(this.path, { ...this.params, ...params }, abort.signal);
      take(page);
      this.note = page.note;
      this.paused = !this.live && page.items.length < PAGE;
      this[field] = null;
    } catch (error) {
      if (abort.signal.aborted) return;
      this[field] = error;
    }
    this.reading = null;
    this.loading = false;
    this.redraw();
  }
}

/**
 * Return the list of `path` with these parameters: its items, note, error, loading, complete, more(), read(). A list that
 * is not `live` is read once.
 */
export function useLiveList(path, params, { live = true } = {}) {
  const key = `${path} ${JSON.stringify(params)}`;
  const [, setTurn] = useState(0);
  const ref = useRef(null);
  if (!ref.current || ref.current.key !== key) {
    ref.current = kept && kept.key === key ? kept : new LiveList(key, path, params, live);
  }
  const list = ref.current;
  useEffect(() => {
    if (list.scroll) scrollTo(0, list.scroll);
    return list.start(() => setTurn((turn) => turn + 1));
  }, [list]);
  return list;
}

// -- A bulk action: a preview with the count and the names, then one request after the other, and what failed.
const SHOWN = 200;
const TOGETHER = 50; // ids in one request, so that progress is visible

/** Repeat a request that the server puts off because there were too many. */
async function patiently(request) {
  for (;;) {
    try {
      return await request();
    } catch (error) {
      if (![429, 503].includes(error.status)) throw error;
      await new Promise((done) => setTimeout(done, 1000));
    }
  }
}

/** What a bulk action did to the runs, and what it means. */
export const BULK = {
  Cancel: ["asked to stop", "Cancelling a run also cancels its child runs."],
  Requeue: ["requeued", "A requeued run becomes pending and resumes after its last completed step."],
  Discard: ["discarded", "A discarded run is deleted with its journal and events. This cannot be undone."],
};

/** The requests of a bulk action: one for each run that is cancelled, and one for several runs of the same state. */
function requestsOf(verb, runs) {
  if (verb === "Cancel") return runs.map((run) => ({ runs: [run], send: () => source.send("POST", runPath(run.run_id, "cancel")) }));
  const batches = [];
  for (const state of new Set(runs.map((run) => run.state))) {
    const some = runs.filter((run) => run.state === state);
    for (let at = 0; at < some.length; at += TOGETHER) {
      const batch = some.slice(at, at + TOGETHER);
      const body = { ids: batch.map((run) => run.run_id), state };
      batches.push({ runs: batch, send: () => source.send("POST", `dead/${verb.toLowerCase()}`, body) });
    }
  }
  return batches;
}

/** The runs of a batch that failed: [run, why]. A request for several runs names them in its answer. */
async function failuresOf(batch) {
  try {
    const answer = await patiently(batch.send);
    const byId = new Map(batch.runs.map((run) => [run.run_id, run]));
    return ((answer && answer.failed) || []).map((each) => [byId.get(each.id) || { run_id: each.id }, each.why]);
  } catch (error) {
    return batch.runs.map((run) => [run, error.message]);
  }
}

/** `verb` is a key of BULK. `onDone` is called after the last request. */
export function BulkDialog({ verb, runs, onDone, onClose }) {
  const [state, setState] = useState({ phase: "preview", count: 0, failed: [] });
  const start = async () => {
    let [count, failed] = [0, []];
    for (const batch of requestsOf(verb, runs)) {
      setState({ phase: "busy", count, failed });
      failed = [...failed, ...(await failuresOf(batch))];
      count += batch.runs.length;
    }
    setState({ phase: "done", count, failed });
    onDone(null);
  };
  const { phase, count, failed } = state;
  const [done, meaning] = BULK[verb];
  return html`<${Dialog} title=${`${verb} ${plural(runs.length, "run")}`} onClose=${onClose}>
    ${phase === "preview" && html`<p>${meaning}</p>
      <ul class="names" tabindex="0" aria-label="Runs">${runs.slice(0, SHOWN).map((run) => html`<li key=${run.run_id}><span class="cut" title=${run.run_id}>${runName(run)}</span>
        <${State} state=${run.state} /></li>`)}${runs.length > SHOWN && html`<li>and ${plural(runs.length - SHOWN, "more run")}</li>`}</ul>`}
    ${phase === "busy" && html`<p role="status">${count} of ${plural(runs.length, "run")}</p>
      <progress max=${runs.length} value=${count} aria-label="Progress"></progress>`}
    ${phase === "done" && html`<p role="status">${plural(count - failed.length, "run")} ${done}.</p>`}
    ${failed.length > 0 && html`<div class="failed" role="alert"><p class="failed-title">${plural(failed.length, "run")} failed</p>
      <ul>${failed.slice(0, SHOWN).map(([run, why]) => html`<li key=${run.run_id}><strong>${runName(run)}</strong> ${why}</li>`)}</ul></div>`}
    <div class="form-actions">
      <${Button} onClick=${onClose}>Close<//>
      ${phase === "preview" && html`<${Button} kind=${verb !== "Requeue" ? "danger" : "primary"} onClick=${start}>${verb} ${plural(runs.length, "run")}<//>`}
    </div>
  <//>`;
}
