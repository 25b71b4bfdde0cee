// The trace of a run: its steps, model calls with their tool calls, and child runs, with what each has used.
import { html, useEffect, useMemo, useState } from "../ui.js";
import { count, plural, runName, usd } from "../format.js";
import { Empty, Failed, Loading, Split, State, Windowed, useNarrow } from "../parts.js";
import { pause } from "../queries.js";
import { go, href } from "../router.js";
import { runPath, source } from "../source.js";
import { Patterns, RowBar, StepDetail, placeOf, took, useScale } from "./timeline.js";
import { isDone, withTimes } from "./timeline_rows.js";
import { failedCall, shownNodes, totalOf, treeOf } from "./trace_tree.js";

const MOST_ROWS = 25000; // of each run, as many as a page of the server has
const MOST_RUNS = 50; // child runs are read level by level
const REFRESH = 2000;

/** Read the rows of a run and of its child runs. Rows of runs that have ended are read once. */
async function readRuns(runId, known, version, signal) {
  const runs = new Map();
  const wanted = [[runId, version]];
  let left = 0;
  for (const [id, state] of wanted) {
    if (runs.has(id)) continue;
    if (runs.size === MOST_RUNS) left += 1;
    else {
      const before = known.get(id);
      if (before && before.version === state && before.ended) runs.set(id, before);
      else {
        const page = await source.get(runPath(id, "timeline"), { limit: MOST_ROWS }, signal);
        const rows = page.items.map(withTimes);
        runs.set(id, { rows, version: state, more: page.next !== null, ended: rows.every((row) => row.to !== null || isDone(row)) });
      }
      wanted.push(...runs.get(id).rows.filter((row) => row.child_run_id).map((row) => [row.child_run_id, row.state]));
    }
  }
  return { runs, left };
}

function useRuns(run, live) {
  const version = `${run.state} ${run.attempt} ${run.generation}`;
  const [state, setState] = useState({ runs: new Map(), left: 0, loading: true, error: null });
  const [turn, setTurn] = useState(0);
  useEffect(() => {
    const abort = new AbortController();
    let [timer, known] = [0, state.runs];
    const read = async () => {
      const began = performance.now();
      try {
        const found = document.hidden && known.size ? null : await readRuns(run.run_id, known, version, abort.signal);
        if (found) setState({ ...found, loading: false, error: null });
        known = found ? found.runs : known;
      } catch (error) {
        if (!abort.signal.aborted) setState((before) => ({ ...before, loading: false, error }));
      }
      if (live && !source.exported && !abort.signal.aborted) timer = setTimeout(read, pause(REFRESH, began));
    };
    read();
    return () => {
      abort.abort();
      clearTimeout(timer);
    };
  }, [run.run_id, live, version, turn]);
  return { ...state, reload: () => setTurn((before) => before + 1) };
}

export function TraceTab({ run, route, live }) {
  const data = useRuns(run, live);
  const [folded, setFolded] = useState(() => new Set());
  const nodes = useMemo(() => treeOf(run.run_id, (id) => data.runs.get(id)?.rows), [data.runs, run.run_id]);
  const id = route.params.get("step");
  const wantsFailed = id === "failed" && !data.loading;
  const open = (step) => go(route.path, { step }, { replace: Boolean(id) });
  useEffect(() => {
    const found = wantsFailed && failedCall(nodes);
    if (found) open(found.id);
  }, [wantsFailed, nodes]);
  const all = useMemo(() => shownNodes(nodes, new Set()), [nodes]);
  const chosen = all.find((each) => each.id === id);
  const toggle = (node) => setFolded((before) => (before.has(node.id) ? new Set([...before].filter((each) => each !== node.id)) : new Set([...before, node.id])));
  const detail = chosen && html`<${StepDetail} key=${id} runId=${chosen.runId} stepId=${id} row=${chosen.row} live=${live} />`;
  return html`
    ${data.error && html`<${Failed} error=${data.error} retry=${data.reload} />`}
    <${Patterns} />
    ${wantsFailed && !chosen && !failedCall(nodes) && html`<p class="note" role="status">No call of this run has failed. The error is from the code of its agent.</p>`}
    ${data.left > 0 && html`<p class="quiet tools">The calls of ${plural(data.left, "more child run")} are on the pages of these runs.</p>`}
    ${[...data.runs.values()].some((each) => each.more) && html`<p class="quiet tools">The first ${count(MOST_ROWS)} rows of each run are shown.</p>`}
    <${Split} title=${chosen && `Call ${chosen.row.label}`} detail=${detail} onClose=${() => open(null)}>
      ${all.length
        ? html`<${Tree} run=${run} live=${live} nodes=${nodes} rows=${all.map((each) => each.row)} folded=${folded} toggle=${toggle} selected=${id} path=${route.path} open=${open} />`
        : data.loading ? html`<${Loading} />` : !data.error && html`<${Empty} title="No step has started." />`}<//>`;
}

function Tree({ run, live, nodes, rows, folded, toggle, selected, path, open }) {
  const narrow = useNarrow();
  const [scale, now] = useScale(rows, run, live);
  const place = useMemo(() => placeOf(scale, [0, 1]), [scale]);
  const items = useMemo(() => shownNodes(nodes, folded, 1), [nodes, folded]);
  const target = items.findIndex((each) => each.id === selected);
  const used = run.usage || {};
  const sums = totalOf(nodes);
  const row = (node) => html`<${Row} key=${node.id} node=${node} now=${now} place=${place} isFolded=${folded.has(node.id)} toggle=${toggle}
    selected=${node.id === selected} link=${href(path, { step: node.id })} open=${open} />`;
  return html`<div class="trace" role="table" aria-label="Trace">
    <div class="trace-row trace-head" role="row">${["Call", "State", "Duration", "Tokens", "Cost", "Time"].map((name) => html`<span key=${name} role="columnheader" class=${["Duration", "Tokens", "Cost"].includes(name) ? "num" : ""}>${name}</span>`)}</div>
    <div class="trace-row strong" role="row"><span role="cell" class="cut">${runName(run)}</span><span role="cell"><${State} state=${run.state} /></span>
      <span role="cell" class="num">${took({ from: Date.parse(run.started_at), to: run.ended_at ? Date.parse(run.ended_at) : null }, now)}</span>
      <span role="cell" class="num">${count(used.total_tokens ?? sums.tokens)}</span><span role="cell" class="num">${usd(used.cost_usd ?? sums.cost)}</span><span role="cell"></span></div>
    <${Windowed} items=${items} height=${narrow ? 52 : 32} row=${row} role="rowgroup" label="Calls" target=${target < 0 ? null : target} />
  </div>`;
}

function Row({ node, now, place, isFolded, toggle, selected, link, open }) {
  const { row, depth, children } = node;
  const time = took(row, now);
  const indent = (element) => element && element.style.setProperty("--depth", Math.min(depth, 8));
  const clicked = (event) => {
    if (event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    open(node.id);
  };
  return html`<div class="trace-row tl-row" role="row" data-selected=${selected ? "" : null}>
    <span role="cell" class="tl-name" ref=${indent}>
      ${children.length > 0 && html`<button type="button" class="fold" aria-expanded=${!isFolded} aria-label=${`Calls in ${row.label}`} onClick=${() => toggle(node)}></button>`}
      ${row.kind !== "step" && html`<span class="tl-kind">${row.kind}</span>`}
      <a class="tl-link cut" data-row href=${link} onClick=${clicked} aria-current=${selected ? "true" : null}
        aria-label=${[row.kind !== "step" && row.kind, row.label, row.written, row.state, time].filter(Boolean).join(", ")}>${row.label}${row.written && html` <span class="quiet">${row.written}</span>`}</a></span>
    <span role="cell"><${State} state=${row.state} /></span>
    ${[time, count(node.tokens), usd(node.cost)].map((text, index) => html`<span key=${index} role="cell" class="num">${text}</span>`)}
    <span role="cell" class="trace-bar"><svg class="tl-area" width="100%" height="100%" aria-hidden="true"><${RowBar} row=${row} place=${place} now=${now} /></svg></span>
  </div>`;
}
