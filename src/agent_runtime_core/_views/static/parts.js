// The parts that pages are made of.
import { html, useEffect, useLayoutEffect, useRef, useState } from "./ui.js";
import { ago, clockTime, count, json, localTime, runName, stateClass, stateName } from "./format.js";
import { href } from "./router.js";

/** The state of a run or step: a mark with a color and a shape, and its name. */
export function State({ state, children }) {
  return html`<span class=${`state ${stateClass(state)}`}><span class="mark" aria-hidden="true"></span>${children || stateName(state)}</span>`;
}

/** Numbers of runs by state, each a link to these runs. `filter` has what else selects them. */
export function StateCounts({ states, counts, filter }) {
  return states.filter((state) => counts[state]).map((state) => html`<a key=${state} href=${href(["runs"], { ...filter, state })}>
    <${State} state=${state}><span class="num">${count(counts[state])}</span> ${stateName(state)}<//></a>`);
}

/** A time as people say it; the exact one is its title. */
export function Ago({ time }) {
  return html`<time datetime=${time || ""} title=${localTime(time)}>${ago(time)}</time>`;
}

export function Loading({ what = "Loading" }) {
  return html`<p class="loading" role="status"><span class="spinner" aria-hidden="true"></span>${what}…</p>`;
}

/** Nothing to show, and what to do about it. */
export function Empty({ title, children }) {
  return html`<div class="empty"><p class="strong">${title}</p>${children && html`<p>${children}</p>`}</div>`;
}

/** A failed request. It never looks like an empty list. */
export function Failed({ error, retry }) {
  const { errors = [], request_id: id } = error.problem || {};
  return html`<div class="failed" role="alert">
    ${"status" in error && html`<p class="failed-title">${error.status ? `Request failed (${error.status})` : "The server does not answer"}</p>`}
    <p>${error.message}</p>
    ${errors.length > 0 && errors[0].message !== error.message && html`<ul>${errors.map((each) => html`<li><code>${each.field}</code> ${each.message}</li>`)}</ul>`}
    ${id && html`<p class="small">Request ${id}</p>`}
    ${retry && html`<${Button} onClick=${retry}>Try again<//>`}
  </div>`;
}

/** What a query has: a failure, that it loads, or `children(data)`. Data that was read before a failure stays below it. */
export function Loaded({ query, children }) {
  return html`
    ${query.error && html`<${Failed} error=${query.error} retry=${query.reload} />`}
    ${query.data ? children(query.data) : !query.error && html`<${Loading} />`}`;
}

/** The rows of a list that is read in pages, or why there are none. */
export function LoadedList({ list, empty, children }) {
  return html`
    ${list.error && html`<${Failed} error=${list.error} retry=${list.reload} />`}
    ${list.items.length ? children : list.loading ? html`<${Loading} />` : !list.error && empty}`;
}

export function PageHead({ title, note, children }) {
  useEffect(() => {
    document.title = `${title} – Agent runtime`;
  }, [title]);
  return html`<header class="page-head">
    <h1>${title}</h1>${note && html`<p class="page-note">${note}</p>`}
    ${children && html`<div class="page-actions">${children}</div>`}
  </header>`;
}

export function Button({ kind = "", type = "button", children, ...rest }) {
  return html`<button type=${type} class=${`button ${kind}`} ...${rest}>${children}</button>`;
}

/** Pairs of a name and a value; pairs without a value are left out. */
export function Facts({ pairs }) {
  return html`<dl class="facts">
    ${pairs.filter(([, value]) => ![null, undefined, false, "", "–"].includes(value))
      .map(([name, value]) => html`<div key=${name}><dt>${name}</dt><dd>${value}</dd></div>`)}
  </dl>`;
}

/** A table of a few rows: `head` is [text, or [text, class], …], `rows` and `foot` have the cells. */
export function Table({ label, head, rows, foot }) {
  const columns = head.map((each) => [].concat(each));
  const line = (cells) => html`<tr>${cells.map((cell, index) => (index
    ? html`<td class=${columns[index][1]}>${cell}</td>`
    : html`<th scope="row">${cell}</th>`))}</tr>`;
  return html`<div class="scroll-x" tabindex="0" role="region" aria-label=${label}><table>
    <thead><tr>${columns.map(([text, name]) => html`<th scope="col" class=${name}>${text}</th>`)}</tr></thead>
    <tbody>${rows.map(line)}</tbody>${foot && html`<tfoot>${line(foot)}</tfoot>`}
  </table></div>`;
}

/** JSON, folded if it is long. */
export function Json({ value, label, lines = 12 }) {
  const [open, setOpen] = useState(false);
  if (value === null || value === undefined) return null;
  const key = Object.keys(value).length === 1 && value.encrypted?.key;
  const text = key ? `(encrypted with key '${key}')` : typeof value === "string" ? value : json(value);
  const all = text.split("\n");
  const long = all.length > lines || text.length > 4000;
  const shown = open || !long ? text : `${all.slice(0, lines).join("\n").slice(0, 4000)}\n…`;
  return html`<div class="json">
    ${label && html`<div class="label">${label}</div>`}
    <pre tabindex="0" aria-label=${label || "JSON"}><code>${shown}</code></pre>
    ${long && html`<button type="button" class="link" aria-expanded=${open} onClick=${() => setOpen(!open)}>
      ${open ? "Show less" : `Show all ${all.length} lines`}</button>`}
  </div>`;
}

/** A dialog, open as long as it is rendered. Escape and a click outside of it close it. */
export function Dialog({ title, onClose, children }) {
  const ref = useRef(null);
  useLayoutEffect(() => {
    const element = ref.current;
    const before = document.activeElement;
    element.showModal();
    return () => {
      element.close();
      if (before && before.isConnected) before.focus();
    };
  }, []);
  const cancelled = (event) => {
    event.preventDefault();
    onClose();
  };
  return html`<dialog ref=${ref} aria-label=${title} onCancel=${cancelled} onClick=${(event) => event.target === ref.current && onClose()}>
    <div class="form"><h2>${title}</h2>${children}</div>
  </dialog>`;
}

/** A form whose fields are `children`. `act(form)` returns a promise; a failure is shown in the form. With `keepOpen`, `act` closes it. */
export function Form({ label, verb, danger = false, act, onDone, onClose, keepOpen = false, children }) {
  const [state, setState] = useState({ busy: false, error: null });
  const submit = async (event) => {
    event.preventDefault();
    setState({ busy: true, error: null });
    try {
      const answer = await act(event.target);
      setState({ busy: false, error: null });
      if (onClose && !keepOpen) onClose();
      if (onDone) onDone(answer);
    } catch (error) {
      setState({ busy: false, error });
    }
  };
  return html`<form class="form" aria-label=${label} onSubmit=${submit}>
    ${children}
    ${state.error && html`<${Failed} error=${state.error} />`}
    <div class="form-actions">
      ${onClose && html`<${Button} onClick=${onClose}>Close<//>`}
      <${Button} type="submit" kind=${danger ? "danger" : "primary"} disabled=${state.busy}>${verb}<//>
    </div>
  </form>`;
}

/** A dialog that asks for a confirmation, then acts. */
export function Confirm({ title, ...form }) {
  return html`<${Dialog} title=${title} onClose=${form.onClose}><${Form} ...${form} /><//>`;
}

/** A labelled field of a form. */
export function Field({ label, hint, children }) {
  return html`<label class="field"><span class="label">${label}</span>${children}
    ${hint && html`<span class="quiet small">${hint}</span>`}</label>`;
}

export function Check({ on, onChange, children }) {
  return html`<label class="check"><input type="checkbox" checked=${on} onChange=${(event) => onChange(event.target.checked)} />${children}</label>`;
}

/** One of a few values: options are [[value, text], …]. */
export function Select({ label, options, value, onChange }) {
  return html`<select aria-label=${label} value=${value} onChange=${(event) => onChange(event.target.value)}>
    ${options.map(([each, text]) => html`<option key=${each} value=${each}>${text}</option>`)}</select>`;
}

/**
 * Rows of a list, of which only the visible ones are in the document. The window scrolls, not the list.
 *
 * `row(item, index)` renders one row of exactly `height` pixels. `onEnd` is called near the last row. `target` is the index
 * of a row to scroll to. With `follow`, a reader at the end stays there while the list grows.
 */
export function Windowed({ items, height, row, onEnd, label, role = "group", target = null, follow = false }) {
  const ref = useRef(null);
  const isAtEnd = useRef(follow);
  const [range, setRange] = useState([0, 40]);
  useLayoutEffect(() => {
    const measure = () => {
      if (!ref.current) return;
      const { top, bottom } = ref.current.getBoundingClientRect();
      isAtEnd.current = bottom < innerHeight + 2 * height;
      // In steps of 5 rows: most scroll events then change nothing.
      const first = Math.max(Math.floor(-top / height / 5 - 1) * 5, 0);
      // A list below the window keeps its first rows, so that Tab reaches them.
      const last = Math.max(Math.ceil((innerHeight - top) / height / 5 + 1) * 5, first + 5);
      setRange((before) => (before[0] === first && before[1] === last ? before : [first, last]));
    };
    if (follow && isAtEnd.current) scrollTo(0, document.documentElement.scrollHeight);
    measure();
    addEventListener("scroll", measure, { passive: true });
    addEventListener("resize", measure);
    return () => {
      removeEventListener("scroll", measure);
      removeEventListener("resize", measure);
    };
  }, [height, items.length, follow]);
  useLayoutEffect(() => {
    if (target === null) return;
    const top = ref.current.getBoundingClientRect().top + target * height;
    // On a narrow page the details cover the lower part.
    if (top < 40 || top > innerHeight * 0.36) scrollBy(0, top - innerHeight * 0.2);
  }, [target, height]);
  const first = Math.min(range[0], Math.max(items.length - 1, 0));
  const last = Math.min(range[1], items.length);
  useEffect(() => {
    if (onEnd && last >= items.length) onEnd();
  }, [last, items.length]);
  // The height of what is not in the document. Set as a property: the policy of the page forbids style attributes.
  const spacer = (rows) => (element) => element && element.style.setProperty("height", `${Math.max(rows, 0) * height}px`);
  return html`<div ref=${ref} class="windowed" role=${role} aria-label=${label}>
    <div ref=${spacer(first)}></div>
    ${items.slice(first, last).map((item, index) => row(item, first + index))}
    <div ref=${spacer(items.length - last)}></div>
  </div>`;
}

/** A link to a run with its key, or else its short id. */
export function RunLink({ run, ...rest }) {
  return html`<a class=${`break ${run.key ? "" : "mono"}`} title=${run.key ? `${run.key}\n${run.run_id}` : run.run_id}
    href=${href(["runs", run.run_id])} ...${rest}>${runName(run)}</a>`;
}

/** A message that appears for a few seconds after an action. */
export function Notice({ text, onClose }) {
  useEffect(() => {
    const timer = setTimeout(onClose, 6000);
    return () => clearTimeout(timer);
  }, [text]);
  return html`<div class="notice" role="status">${text}</div>`;
}

// -- A list, and the details of the chosen row next to it; on a narrow page they are below.
const NARROW = matchMedia("(max-width: 860px)");

/** Whether the page is narrow. Rows are then higher, because their parts are below each other. */
export function useNarrow() {
  const [narrow, setNarrow] = useState(NARROW.matches);
  useEffect(() => {
    const changed = () => setNarrow(NARROW.matches);
    NARROW.addEventListener("change", changed);
    return () => NARROW.removeEventListener("change", changed);
  }, []);
  return narrow;
}

export function Split({ children, detail, title, onClose }) {
  return html`<div class=${detail ? "split has-detail" : "split"}>
    <div class="split-main">${children}</div>
    ${detail && html`<${Detail} title=${title} onClose=${onClose}>${detail}<//>`}
  </div>`;
}

function Detail({ title, onClose, children }) {
  const ref = useRef(null);
  useEffect(() => ref.current.focus({ preventScroll: true }), [title]);
  const close = () => {
    const row = document.querySelector("[data-row]:is([aria-current=true], [aria-pressed=true])");
    onClose();
    if (row) row.focus({ preventScroll: true });
  };
  const keyed = (event) => event.key === "Escape" && close();
  return html`<aside class="detail" aria-label=${title} onKeyDown=${keyed}>
    <header class="detail-head"><h2 ref=${ref} tabindex="-1">${title}</h2><${Button} kind="small" aria-label="Close the details" onClick=${close}>Close<//></header>
    ${children}</aside>`;
}

/** A row of events or records: number, time, type and text. It opens its details. */
export function LogRow({ number, time, type, text, chosen, marked = false, onOpen }) {
  return html`<button type="button" data-row class=${marked ? "log-row is-marked" : "log-row"} aria-pressed=${chosen} onClick=${onOpen}>
    <span class="num quiet">${number}</span><span class="num quiet">${clockTime(time)}</span>
    <span class="mono cut" title=${type}>${type}</span><span class="quiet cut">${text}</span>
  </button>`;
}
