// The timeline of a run: a row for each step, with its bar on a common axis, and the details of a step.
import { html, useEffect, useMemo, useRef, useState } from "../ui.js";
import { clockTime, count, duration, localTime, shortId, stateClass, usd } from "../format.js";
import {
  Button, Check, Empty, Facts, Failed, Json, Loaded, Loading, Split, State, Table, Windowed, useNarrow,
} from "../parts.js";
import { useQuery } from "../queries.js";
import { go, href, useRoute } from "../router.js";
import { now, runPath } from "../source.js";
import { flatten, isDone, summaryOf, useRows } from "./timeline_rows.js";
import { activityOf, millis, positionOf, ticks, timeAt, timeScale, union, viewOf } from "./timeline_scale.js";

export function Timeline({ run, live }) {
  const [newest, setNewest] = useState(false);
  const [hideDone, setHideDone] = useState(false);
  const data = useRows(run.run_id, { live, newest, version: `${run.attempt} ${run.generation}` });
  const { rows } = data;
  const { id, open, link } = useSelection();
  const done = useMemo(() => rows.filter(isDone).length, [rows]);
  const row = rows.find((each) => each.step_id === id) || null;
  const detail = id && html`<${StepDetail} key=${id} runId=${run.run_id} stepId=${id} row=${row} live=${live} />`;
  return html`
    ${data.error && html`<${Failed} error=${data.error} retry=${data.reload} />`}
    <${Patterns} />
    <${Split} title=${id && `Step ${row ? row.label : id}`} detail=${detail} onClose=${() => open(null)}>
      ${rows.length
        ? html`<${Chart} run=${run} live=${live} data=${data} selected=${id} open=${open} link=${link} newest=${newest} hideDone=${hideDone}>
            <${Check} on=${hideDone} onChange=${setHideDone}>Hide done ${done > 0 && html`<span class="quiet num">${count(done)}</span>`}<//>
            <${Check} on=${newest} onChange=${setNewest}>Newest first<//><//>`
        : data.loading
          ? html`<${Loading} />`
          : !data.error && html`<${Empty} title="No step has started.">
              ${live ? "Steps appear here as soon as they start." : "The run finished without a step."}<//>`}<//>`;
}

/** The step in the URL. Choosing another one replaces the URL, so "back" leaves the steps at once. */
function useSelection() {
  const { path, params } = useRoute();
  const id = params.get("step");
  const others = Object.fromEntries([...params].filter(([name]) => name !== "step"));
  return {
    id,
    link: (step) => href(path, { ...others, step }),
    open: (step) => go(path, { ...others, step }, { replace: Boolean(id) }),
  };
}

function Chart({ run, live, data, selected, open, link, newest, hideDone, children }) {
  const { rows } = data;
  const narrow = useNarrow();
  const [zoom, setZoom] = useState(null);
  const [toggled, setToggled] = useState(() => new Set());
  const toggle = (item) => setToggled((before) => {
    const ids = item.ends || [item.id];
    return ids.some((id) => before.has(id)) ? new Set([...before].filter((id) => !ids.includes(id))) : new Set([...before, ...ids]);
  });
  const [scale, now] = useScale(rows, run, live);
  const items = useMemo(() => flatten(rows, { toggled, hideDone, newest, selected }), [rows, toggled, hideDone, newest, selected]);
  const chart = useRef(null);
  const view = viewOf(scale, zoom);
  const drag = useDragZoom(chart, scale, view, setZoom);
  const place = useMemo(() => placeOf(scale, view), [scale, ...view]);
  const marks = ticks(scale, view, narrow ? 4 : 7);
  const target = selected ? items.findIndex((item) => item.id === selected) : -1;
  const common = { place, now, toggle };
  const row = (item) => (item.type === "group"
    ? html`<${GroupRow} key=${item.id} item=${item} ...${common} />`
    : html`<${StepRow} key=${item.id} item=${item} ...${common} selected=${item.id === selected} link=${link} open=${open} />`);
  return html`
    <div class="tools">${children}
      <span class="quiet num" role="status">${data.complete || data.error ? `${count(rows.length)} ${rows.length === 1 ? "step" : "steps"}`
        : `${count(rows.length)} of ${count(data.total)} steps loaded`}</span>
      <${Button} kind="small" disabled=${!zoom} title="Drag over the bars to zoom" onClick=${() => setZoom(null)}>Reset the zoom<//>
    </div>
    <div ref=${chart} class="tl-chart" ...${drag}>
      <div class="tl-axis"><span></span><div class="tl-area"><${Axis} marks=${marks} view=${view} /></div></div>
      <div class="tl-rows">
        <div class="tl-behind"><${Axis} marks=${marks} view=${view} edge=${live ? place(now) : null} /></div>
        ${items.length ? html`<${Windowed} items=${items} height=${narrow ? 52 : 32} row=${row} onEnd=${data.more} label="Steps" target=${target < 0 ? null : target} />`
          : html`<${Empty} title="Every step is done.">Clear “Hide done” to see them.<//>`}
      </div>
      <div class="tl-drag" hidden></div>
    </div>`;
}

/** The name of a row at its depth, and the button that folds what is below it. */
function Name({ item, children }) {
  const indent = (element) => element && element.style.setProperty("--depth", Math.min(item.depth, 6));
  return html`<div class="tl-name" ref=${indent}>${children}</div>`;
}

export const took = (row, now) => {
  const to = row.to ?? (row.state === "in doubt" ? null : now);
  return Number.isFinite(row.from) && row.from !== null && to !== null ? duration(Math.max(to - row.from, 0) / 1000) : "";
};

function StepRow({ item, selected, open, link, toggle, place, now }) {
  const { row } = item;
  const time = took(row, now);
  const clicked = (event) => {
    if (event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    open(row.step_id);
  };
  return html`<div class="tl-row" data-selected=${selected ? "" : null}>
    <${Name} item=${item}>
      ${item.below > 0 && html`<button type="button" class="fold" aria-expanded=${item.open} aria-label=${`Steps in ${row.label}`} onClick=${() => toggle(item)}></button>`}
      ${row.kind !== "step" && html`<span class="tl-kind">${row.kind}</span>`}
      <a class="tl-link cut" data-row href=${link(row.step_id)} onClick=${clicked} aria-current=${selected ? "true" : null}
        aria-label=${[row.label, row.written, row.state, time].filter(Boolean).join(", ")} title=${row.key ? `${row.label}, key ${row.key}` : row.label}
        >${row.label}${row.written && html` <span class="quiet">${row.written}</span>`}</a>
      <${State} state=${row.state} /><span class="tl-time quiet num">${time}</span><//>
    <svg class="tl-area" width="100%" height="100%" aria-hidden="true"><${RowBar} row=${row} place=${place} now=${now} /></svg>
  </div>`;
}

function GroupRow({ item, toggle, place, now }) {
  const summary = useMemo(() => summaryOf(item.rows), [item.rows]);
  const counts = summary.states.map(([state, rows]) => `${count(rows.length)} ${state}`).join(", ");
  const time = took({ ...summary, to: summary.open ? null : summary.to }, now);
  return html`<div class="tl-row">
    <${Name} item=${item}>
      ${item.kind !== "step" && html`<span class="tl-kind">${item.kind}</span>`}
      <button type="button" class="tl-link fold cut" data-row aria-expanded=${item.open} onClick=${() => toggle(item)}
        aria-label=${`${item.name} × ${item.rows.length}, ${counts}, ${time}`} title=${item.name}>${item.name} <span class="quiet">× ${count(item.rows.length)}</span></button>
      <span class="cut" title=${counts}>${summary.states.map(([state, rows]) => html`<${State} key=${state} state=${state}>${count(rows.length)} ${state}<//> `)}</span>
      <span class="tl-time quiet num">${time}</span><//>
    <svg class="tl-area" width="100%" height="100%" aria-hidden="true"><${GroupBar} states=${summary.states} place=${place} now=${now} /></svg>
  </div>`;
}

// -- Everything that is stored of one step.
/** `row` is what the timeline knows of the step, null until it has loaded. */
export function StepDetail({ runId, stepId, row, live }) {
  const query = useQuery(runPath(runId, "steps", stepId), {}, { every: live && (!row || row.to === null) ? 2000 : 0 });
  // A step that has ended since it was read has its output only now.
  useEffect(() => {
    if (query.data && row && query.data.ended_at !== row.ended_at) query.reload();
  }, [row && row.ended_at]);
  return html`<${Loaded} query=${query}>${(step) => html`<${Step} step=${step} />`}<//>`;
}

function Step({ step }) {
  const { error } = step;
  const several = step.attempts && step.attempts.length > 1;
  return html`<${State} state=${step.state} />
    ${step.state === "in doubt" && html`<p class="note">The worker stopped while this step was running, so its outcome is unknown.
      Check whether it took effect before you resume the run.</p>`}
    ${error && html`<p class="error-text"><strong>${error.type}</strong>: ${error.message}</p>
      ${error.traceback && html`<${Json} value=${error.traceback} label="Traceback" />`}`}
    ${several && html`<${Table} label="Attempts" head=${["Attempt", "State", ["Duration", "num"], "Error"]} rows=${step.attempts.map((each) => [
      each.number, html`<${State} state=${each.state} />`,
      each.ended_at && duration((Date.parse(each.ended_at) - Date.parse(each.started_at)) / 1000), each.error && `${each.error.type}: ${each.error.message}`,
    ])} />`}
    <${Json} value=${step.input} label="Input" /><${Json} value=${step.output} label="Output" />
    <${Facts} pairs=${[
      ["Kind", step.kind],
      ["Started", step.started_at && html`<time title=${localTime(step.started_at)}>${clockTime(step.started_at)}</time>`],
      ["Duration", step.duration_ms !== null && duration(step.duration_ms / 1000)],
      ["Tokens", count(step.tokens)], ["Cost", usd(step.cost_usd)],
      ["Child run", step.child_run_id && html`<a href=${href(["runs", step.child_run_id])}>${shortId(step.child_run_id)}</a>`],
      ["Name", step.name], ["Key", step.key], ["Sequence", count(step.sequence)],
      ["Idempotency key", step.idempotency_key && html`<code>${step.idempotency_key}</code>`],
      ["Digest", step.digest && html`<code>${step.digest}</code>`],
    ]} />
    ${step.records && step.records.length > 0 && html`<details><summary>${step.records.length === 1 ? "1 record" : `${step.records.length} records`}</summary>
      <${Json} value=${step.records} label="Records" /></details>`}`;
}

// -- What is drawn: the axis and the bar of a row or a group. Positions are percent of the width.
const NARROWEST = 0.4; // percent: a narrower bar gets a line of two pixels around it, so a millisecond is still seen
/** The angle of the stripes of a state. States without one have a plain bar. */
const STRIPES = { "in-doubt": 45, retrying: 90, failed: -45, waiting: 0 };

/** The patterns that bars refer to, once in the document. */
export function Patterns() {
  return html`<svg class="tl-patterns" width="0" height="0" aria-hidden="true"><defs>
    ${Object.entries(STRIPES).map(([state, angle]) => html`<pattern key=${state} id=${`tl-${state}`} class=${`is-${state}`}
      width="6" height="6" patternUnits="userSpaceOnUse" patternTransform=${`rotate(${angle})`}>
      <rect width="6" height="6" class="soft" /><rect width="3" height="6" class="tone" /></pattern>`)}
  </defs></svg>`;
}

function patternOf(state) {
  const name = ["dead", "timed out"].includes(state) ? "failed" : state.replaceAll(" ", "-");
  return name in STRIPES ? `url(#tl-${name})` : null;
}

/** The percent of a time in the view. */
export function placeOf(scale, [a, b]) {
  return (time) => ((positionOf(scale, time) - a) / (b - a)) * 100;
}

/** The times above the rows, or (with `edge`, null if there is none) the lines below them. */
function Axis({ marks, view: [a, b], edge }) {
  const percent = (position) => ((position - a) / (b - a)) * 100;
  const line = (x, name) => html`<line key=${name + x} class=${name} x1=${`${x}%`} x2=${`${x}%`} y1="0" y2="100%" />`;
  return html`<svg class="tl-lines" width="100%" height="100%" aria-hidden="true">
    ${marks.map(({ position, label, gap }) => {
      const x = percent(position);
      const [from, to] = gap ? [percent(gap.start), percent(gap.end)] : [0, 0];
      return html`${gap ? html`<rect key=${`gap${x}`} class="tl-gap" x=${`${from}%`} width=${`${to - from}%`} height="100%" />` : edge !== undefined && line(x, "")}
        ${edge === undefined && html`<text key=${`at${x}`} x=${`${x}%`} y="20" text-anchor=${x < 4 ? "start" : x > 96 ? "end" : "middle"}>${label}</text>`}`;
    })}
    ${typeof edge === "number" && line(edge, "tl-edge")}
  </svg>`;
}

function piece({ key, from, to, state, y = "25%", height = "50%" }) {
  if (to < 0 || from > 100) return null;
  const x = Math.min(Math.max(from, -1), 100 - NARROWEST);
  return html`<rect key=${key} class=${`tl-bar ${stateClass(state)} ${to - x < NARROWEST ? "is-thin" : ""}`} x=${`${x}%`} y=${y} height=${height} rx="3"
    width=${`${Math.max(Math.min(to, 101) - x, NARROWEST)}%`} fill=${patternOf(state)} />`;
}

/** The bar of a row: its attempts in the colors of their states, each with a mark, joined by a line. */
export function RowBar({ row, place, now }) {
  if (row.from === null) return null; // a copied step ran in the run that was forked
  const tried = row.attempts.filter((each) => each.from !== null);
  if (tried.length < 2) return piece({ from: place(row.from), to: place(row.to ?? now), state: row.state });
  const open = row.to === null && row.state !== "in doubt";
  const [a, b] = [`${place(row.from)}%`, `${place(row.to ?? now)}%`];
  return html`<line class=${`tl-join ${stateClass(row.state)}`} x1=${a} x2=${b} y1="50%" y2="50%" />
    ${tried.map((each, index) => {
      const state = row.to === null && index === tried.length - 1 ? row.state : each.state;
      const x = place(each.from);
      return html`${piece({ key: each.number, from: x, to: place(each.to ?? (open ? now : each.from)), state })}
        <line key=${`mark${each.number}`} class=${`tl-attempt ${stateClass(each.state)}`} x1=${`${x}%`} x2=${`${x}%`} y1="12%" y2="88%" />`;
    })}`;
}

/** The bar of a folded fan-out: a lane for each state, with the times in which its rows worked. */
function GroupBar({ states, place, now }) {
  return useMemo(() => {
    const size = 80 / states.length;
    // Rounded, so that thousands of rows are at most a few hundred pieces.
    const rounded = (time) => Math.round(Math.min(Math.max(place(time), -1), 101) * 4) / 4;
    return states.map(([state, rows], lane) => {
      const times = union(rows.filter((row) => row.from !== null).map((row) => [rounded(row.from), rounded(row.to ?? now)]));
      return times.map(([from, to]) => piece({ key: `${state}${from}`, from, to, state, y: `${10 + lane * size}%`, height: `${size - 4}%` }));
    });
  }, [states, place, now]);
}

// -- The time axis of the timeline: its end, its scale, and dragging.
const DRAG_MINIMUM = 6; // pixels
const STALE = 3600e3; // a "running" run without a sign of life for an hour, such as in a copied file

/** Return [scale, now]. The axis ends when the run ended, or a little after now if it is live. */
export function useScale(rows, run, live) {
  const [clock, setClock] = useState(now);
  useEffect(() => {
    if (!live) return undefined;
    const timer = setInterval(() => !document.hidden && setClock(now()), 500);
    return () => clearInterval(timer);
  }, [live]);
  const { busy, from, last } = useMemo(() => {
    const parents = new Set(rows.map((row) => row.parent));
    return {
      busy: union(rows.flatMap((row) => activityOf(row, Infinity, parents.has(row.step_id)))),
      from: rows.reduce((first, row) => Math.min(first, row.from ?? Infinity), millis(run.started_at) ?? Infinity),
      last: rows.reduce((end, row) => Math.max(end, row.to ?? row.from ?? 0), 0),
    };
  }, [rows, run.started_at]);
  // The clock of the browser may be slower than the clock of the worker.
  const end = live ? Math.max(Math.min(clock, millis(run.updated_at) + STALE), last) : Math.max(millis(run.ended_at) ?? 0, last);
  const first = Number.isFinite(from) ? from : end;
  // The scale stays as it is until the edge has come to its end: then it gets an eighth longer.
  const axis = live ? first + 500 * 1.125 ** Math.ceil(Math.log(Math.max(end - first, 500) / 500) / Math.log(1.125)) : end;
  return [useMemo(() => timeScale(busy, first, axis), [busy, first, axis]), end];
}

/** Handlers of the chart: dragging over the bars or the axis zooms, a double click resets. */
function useDragZoom(chart, scale, view, setZoom) {
  const drag = useRef(null);
  const show = (a, b) => {
    const mark = chart.current.querySelector(".tl-drag");
    mark.hidden = a === b;
    mark.style.setProperty("left", `${Math.min(a, b) - chart.current.getBoundingClientRect().left}px`);
    mark.style.setProperty("width", `${Math.abs(a - b)}px`);
  };
  const end = () => {
    drag.current = null;
    show(0, 0);
  };
  const inside = ({ clientX }, { left, right }) => Math.min(Math.max(clientX, left), right);
  return {
    onPointerDown: (event) => {
      const box = chart.current.querySelector(".tl-axis .tl-area").getBoundingClientRect();
      if (event.button === 0 && inside(event, box) === event.clientX) drag.current = { x: event.clientX, box, moved: false };
    },
    onPointerMove: (event) => {
      const now = drag.current;
      if (!now || (!now.moved && Math.abs(event.clientX - now.x) < DRAG_MINIMUM)) return;
      if (!now.moved) chart.current.setPointerCapture(event.pointerId);
      now.moved = true;
      show(now.x, inside(event, now.box));
    },
    onPointerUp: (event) => {
      const now = drag.current;
      end();
      if (!now || !now.moved) return;
      const time = (x) => timeAt(scale, view[0] + ((x - now.box.left) / now.box.width) * (view[1] - view[0]));
      setZoom([now.x, inside(event, now.box)].sort((a, b) => a - b).map(time));
      // The click that follows a drag opens no step.
      const swallow = (click) => {
        click.preventDefault();
        click.stopPropagation();
      };
      addEventListener("click", swallow, { capture: true, once: true });
      setTimeout(() => removeEventListener("click", swallow, { capture: true }), 0);
    },
    onPointerCancel: end,
    onDragStart: (event) => event.preventDefault(),
    onDblClick: () => setZoom(null),
  };
}
