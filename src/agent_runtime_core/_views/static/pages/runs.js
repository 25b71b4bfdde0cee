// The lists of runs: all of them, with filters in the URL, and those that finished without a result.
import { html, useContext, useEffect, useMemo, useRef, useState } from "../ui.js";
import { ago, count, duration, localTime, plural, shortId, stateName, usd } from "../format.js";
import { Queue, isLive, useCan } from "../queries.js";
import { Button, Confirm, Empty, Field, Notice, PageHead, Select, StateCounts } from "../parts.js";
import { go, href } from "../router.js";
import {
  AgeCell, BULK, BulkDialog, REPAIRABLE, RunCell, RunTable, StateCell, useLiveList, useSelection,
} from "../run_table.js";
import { ApiError, source } from "../source.js";

const STATES = ["pending", "running", "waiting", "retrying", "in_doubt", "succeeded", "failed", "dead", "timed_out", "cancelled"];
// What finds runs by reading them, in a bounded number: such a list is not read again and again.
const SCANNED = ["search", "metadata", "tag", "min_attempts", "error_type", "code_version", "sort"];
const FILTERS = ["q", "state", "agent", "since", "until", "parent", "conversation", "tenant", ...SCANNED];
/** The columns that can be chosen, by their names in the URL: [label, class, width, text of a run, order]. */
const COLUMNS = {
  age: ["Age", "num cell-age", "88px", null, "age"],
  duration: ["Duration", "num", "96px", (run) => duration(run.duration_seconds), "duration"],
  attempt: ["Attempt", "num", "72px", (run) => run.attempt, "attempts"],
  tokens: ["Tokens", "num", "72px", (run) => count(run.tokens)],
  cost: ["Cost", "num", "72px", (run) => usd(run.cost_usd), "cost"],
  started: ["Started", "num", "144px", (run) => localTime(run.started_at)],
  ended: ["Ended", "num", "144px", (run) => localTime(run.ended_at)],
  due: ["Due", "num", "88px", (run) => ago(run.scheduled_at)],
  tags: ["Tags", "cell-more", "minmax(80px, 1fr)", (run) => run.tags.join(", ")],
  tenant: ["Tenant", "cell-more", "minmax(80px, 1fr)", (run) => run.tenant],
  worker: ["Worker", "cell-more", "minmax(80px, 1fr)", (run) => run.worker],
  concurrency_key: ["Concurrency key", "cell-more", "minmax(80px, 1fr)", (run) => run.concurrency_key],
  conversation: ["Conversation", "cell-more", "minmax(80px, 1fr)", (run) => run.conversation_id],
};
const SHOWN = ["age", "duration", "attempt", "tokens", "cost"];
const FIRST = [["State", "cell-state"], ["Run", "cell-main"]];
const DAY = 86400000;
/** Time ranges: [label, since and until as times before now and before this midnight]. */
const RANGES = {
  hour: ["Last hour", (now) => [now - DAY / 24, null]],
  day: ["Last 24 hours", (now) => [now - DAY, null]],
  yesterday: ["Yesterday", (now, midnight) => [midnight - DAY, midnight]],
  week: ["Last 7 days", (now) => [now - 7 * DAY, null]],
};

function filtersOf(params) {
  return Object.fromEntries(FILTERS.map((name) => [name, params.getAll(name)]).filter(([, values]) => values.length));
}

export function RunsPage({ route }) {
  const filters = filtersOf(route.params);
  const columns = (route.params.get("columns") || "").split(",").filter((name) => COLUMNS[name]);
  const list = useLiveList("runs", filters, { live: !SCANNED.some((name) => filters[name]) });
  const { data: queue } = useContext(Queue);
  const filtered = Object.keys(filters).length > 0;
  const change = (changes) => go(["runs"], { ...filters, columns: columns.join(",") || null, ...changes }, { replace: true });
  const [q] = filters.q || [];
  const empty = html`<${Empty} title=${filtered ? "No run matches these filters." : "The store has no runs."}>
    ${q ? html`<${Button} onClick=${() => change({ q: null, search: q })}>Search the contents of runs for “${q}”<//>`
      : filtered ? html`<a href=${href(["runs"])}>Show all runs</a>` : "They appear here as soon as they are submitted."}<//>`;
  return html`
    <${PageHead} title="Runs" />
    <div class="counts" role="group" aria-label="Runs in the store">${queue && html`<span><strong class="num">${count(queue.total)}</strong> in the store</span>
      <${StateCounts} states=${STATES} counts=${queue.by_status} />`}</div>
    <${Filters} filters=${filters} change=${change} agents=${Object.keys(queue ? queue.by_agent : {})}
      tenants=${[...new Set(list.items.map((run) => run.tenant))]} />
    <${Options} filters=${filters} change=${change} columns=${columns.length ? columns : SHOWN} />
    <${Listed} list=${list} filters=${filters} change=${change} />
    <${Runs} key=${list.key} list=${list} empty=${empty} columns=${columns.length ? columns : SHOWN}
      sort=${{ by: (filters.sort || [])[0], set: (by) => change({ sort: by }) }} />`;
}

/** The range of RANGES that a filter has: today's, as the ranges of "now" have moved on. */
function rangeTimes(name) {
  const midnight = new Date();
  midnight.setHours(0, 0, 0, 0);
  const [since, until] = RANGES[name][1](Date.now(), midnight.getTime());
  return { since: new Date(since).toISOString(), until: until && new Date(until).toISOString() };
}

function Filters({ filters, change, agents, tenants }) {
  const [q] = filters.q || [""];
  const [search] = filters.search || [""];
  const [agent] = filters.agent || [""];
  const [tenant] = filters.tenant || [""];
  const chosen = filters.state || [];
  const [text, setText] = useState(search || q);
  const latest = useRef(change);
  latest.current = change;
  const timer = useRef(0);
  useEffect(() => {
    setText(search || q); // the filters may be changed by a link, too
    return () => clearTimeout(timer.current);
  }, [search, q]);
  const typed = ({ target: { value } }) => {
    setText(value);
    clearTimeout(timer.current);
    timer.current = setTimeout(() => latest.current({ q: value, search: null }), 250);
  };
  const submit = ({ key, target: { value } }) => {
    if (key !== "Enter" || !value.trim()) return;
    clearTimeout(timer.current);
    change({ q: null, search: value.trim() });
  };
  // Times in the time zone of the browser; the URL has them in UTC.
  const time = (name, label) => html`<${Field} label=${label}><input type="datetime-local"
    value=${filters[name] ? localTime(filters[name][0]).replace(" ", "T") : ""}
    onChange=${(event) => change({ [name]: event.target.value && new Date(event.target.value).toISOString() })} /><//>`;
  return html`<div class="filters" role="search">
    <input type="search" aria-label="Run id or key begins with; Enter searches the contents" placeholder="Id or key, Enter: any text" value=${text}
      title="Finds runs by the beginning of their id or key. Enter searches inputs, results, errors, messages and metadata."
      onInput=${typed} onKeyDown=${submit} />
    <${Select} label="State" value="" onChange=${(state) => change({ state: [...chosen, state] })}
      options=${[["", chosen.length ? "Add a state" : "All states"], ...STATES.filter((each) => !chosen.includes(each)).map((each) => [each, stateName(each)])]} />
    <${Select} label="Agent" value=${agent} onChange=${(each) => change({ agent: each })}
      options=${[["", "All agents"], ...[...new Set([...agents, ...(filters.agent || [])])].map((each) => [each, each])]} />
    ${(tenant || tenants.length > 1) && html`<${Select} label="Tenant" value=${tenant} onChange=${(each) => change({ tenant: each })}
      options=${[["", "All tenants"], ...[...new Set([...tenants, tenant])].filter(Boolean).map((each) => [each, each])]} />`}
    <${Select} label="Created" value="" onChange=${(name) => change(rangeTimes(name))}
      options=${[["", filters.since || filters.until ? "Another time" : "Any time"], ...Object.entries(RANGES).map(([name, [label]]) => [name, label])]} />
    ${time("since", "Created from")}${time("until", "Created before")}
  </div>`;
}

const MORE = [["tag", "Tag"], ["metadata", "Metadata", "key=value"], ["error_type", "Error type", "ConnectionError"],
  ["code_version", "Code version"], ["min_attempts", "Attempts, at least"]];

/** A text that counts once it is entered. What is typed stays while the list is read again. */
function Option({ label, value, set, ...rest }) {
  const [text, setText] = useState(value);
  useEffect(() => setText(value), [value]);
  const changed = () => {
    if (text !== value) set(text);
    setText(value);
  };
  return html`<${Field} label=${label}><input ...${rest} value=${text} onInput=${(event) => setText(event.target.value)} onChange=${changed} /><//>`;
}

/** The filters that are seldom used, and the columns. */
function Options({ filters, change, columns }) {
  const field = ([name, label, placeholder]) => {
    const adds = name === "metadata"; // each value is one more condition
    const set = (value) => change({ [name]: adds ? [...(filters[name] || []), value] : value });
    return html`<${Option} key=${name} label=${label} type=${name === "min_attempts" ? "number" : "text"} min="1" placeholder=${placeholder}
      value=${adds ? "" : (filters[name] || [""])[0]} set=${set} />`;
  };
  const toggle = (name) => {
    const kept = Object.keys(COLUMNS).filter((each) => columns.includes(each) !== (each === name));
    change({ columns: kept.join(",") });
  };
  return html`<div class="options">
    <details><summary>More filters</summary><div class="filters">${MORE.map(field)}</div></details>
    <details><summary>Columns</summary><div class="tools">${Object.entries(COLUMNS).map(([name, [label]]) => html`<label key=${name} class="check">
      <input type="checkbox" checked=${columns.includes(name)} disabled=${columns.length === 1 && columns[0] === name} onChange=${() => toggle(name)} />${label}</label>`)}</div></details>
  </div>`;
}

const WORDS = { tag: "tag", metadata: "metadata", min_attempts: "attempts ≥", error_type: "error", code_version: "code", search: "text", sort: "greatest first:" };

function chipText(name, value) {
  if (name === "parent") return `child runs of ${shortId(value)}`;
  return `${WORDS[name] || name} ${name === "state" ? stateName(value) : value}`;
}

/** How many rows are listed, the filters that have no field above, and what was not read. */
function Listed({ list, filters, change }) {
  const chips = ["state", "parent", "conversation", ...SCANNED].flatMap((name) => (filters[name] || []).map((value) => [name, value]));
  const number = plural(list.items.length, "run");
  return html`<div class="listed"><span class="quiet" role="status">${!list.loading && `${list.complete ? number : filters.sort ? `The first ${number}` : `The newest ${number}`} listed`}</span>
    ${chips.map(([name, value]) => html`<button key=${name + value} type="button" class="chip" title="Remove this filter"
      onClick=${() => change({ [name]: filters[name].filter((each) => each !== value) })}>
      <span class="cut">${chipText(name, value)}</span><span aria-hidden="true">×</span></button>`)}
    ${Object.keys(filters).length > 0 && html`<a href=${href(["runs"])}>Remove all filters</a>`}
    ${list.note && html`<span class="quiet">${list.note}</span>`}
  </div>`;
}

/** The cells of a row with these columns. */
function cellsOf(columns) {
  return (run) => html`<${StateCell} run=${run} /><${RunCell} run=${run} />
    ${columns.map((name) => {
      const [, kind, , text] = COLUMNS[name];
      return text ? html`<span key=${name} role="cell" class=${kind} title=${kind === "num" ? null : text(run)}>${text(run) || "–"}</span>`
        : html`<${AgeCell} key=${name} time=${run.created_at} />`;
    })}`;
}

function Runs({ list, empty, columns, sort }) {
  const can = useCan();
  const names = columns.join(",");
  const cells = useMemo(() => cellsOf(columns), [names]);
  const head = [...FIRST, ...columns.map((name) => [COLUMNS[name][0], COLUMNS[name][1], COLUMNS[name][4]])];
  const selection = useSelection();
  const [dialog, setDialog] = useState(null);
  const button = (verb, runs) => runs.length > 0 && html`<${Button} kind="small" onClick=${() => setDialog({ verb, runs })}>${verb} ${count(runs.length)}<//>`;
  const actions = (chosen) => html`
    ${can("act") && button("Cancel", chosen.filter((run) => isLive(run.state)))}
    ${can("admin") && button("Requeue", chosen.filter((run) => REPAIRABLE.includes(run.state)))}`;
  const done = () => {
    selection.set([]);
    list.read();
  };
  return html`
    <${RunTable} list=${list} head=${head} cells=${cells} selection=${can("act") || can("admin") ? selection : null} actions=${actions}
      widths=${columns.map((name) => COLUMNS[name][2])} sort=${sort} kind="runs-table" label="Runs" empty=${empty} />
    ${dialog && html`<${BulkDialog} ...${dialog} onDone=${done} onClose=${() => setDialog(null)} />`}`;
}

// -- Runs that finished without a result: look at them, requeue them, or discard them.
const DEAD_HEAD = [["Run", "cell-main"], ["State", "cell-state"], ["Ended", "num cell-age"], ["Attempt", "num"]];

export function DeadPage({ route }) {
  const chosen = route.params.get("state");
  const state = REPAIRABLE.includes(chosen) ? chosen : "dead";
  const queue = useContext(Queue);
  const can = useCan();
  const list = useLiveList("runs", { state });
  const selection = useSelection();
  const [dialog, setDialog] = useState(null); // { verb, runs }; without runs: all of the state
  const [notice, setNotice] = useState(null);
  const numbers = queue.data ? queue.data.by_status : {};
  const total = numbers[state] || 0;
  const close = () => setDialog(null);
  const done = (text) => {
    setNotice(text);
    selection.set([]);
    queue.reload();
    list.read();
  };
  const buttons = (runs) => ["Requeue", "Discard"].map((verb) => html`<${Button} key=${verb} kind=${`small ${verb === "Discard" ? "danger" : ""}`}
    onClick=${() => setDialog({ verb, runs })}>${verb}${runs ? "" : ` all ${count(total)}`}<//>`);
  return html`
    <${PageHead} title="Dead" note="Runs that crashed their worker too often, or that finished without a result">
      ${can("admin") && total > 0 && buttons(null)}<//>
    <div class="filters"><${Select} label="State" value=${state} onChange=${(each) => go(["dead"], { state: each }, { replace: true })}
      options=${REPAIRABLE.map((each) => [each, `${stateName(each)} (${count(numbers[each] || 0)})`])} /></div>
    <${RunTable} list=${list} head=${DEAD_HEAD} selection=${can("admin") ? selection : null} actions=${buttons}
      cells=${(run) => html`<${RunCell} run=${run} /><${StateCell} run=${run} /><${AgeCell} time=${run.ended_at} /><span role="cell" class="num">${run.attempt}</span>`}
      kind="dead-table" label=${`Runs in the state ${stateName(state)}`}
      empty=${html`<${Empty} title=${state === "failed" ? "No run has failed." : `No run is ${stateName(state)}.`} />`} />
    ${dialog && (dialog.runs
      ? html`<${BulkDialog} ...${dialog} onDone=${done} onClose=${close} />`
      : html`<${AllDialog} verb=${dialog.verb} state=${state} total=${total} reload=${queue.reload} onDone=${done} onClose=${close} />`)}
    ${notice && html`<${Notice} text=${notice} onClose=${() => setNotice(null)} />`}`;
}

/** All runs of a state. The request has the number that is shown: the server changes nothing if there are more or fewer. */
function AllDialog({ verb, state, total, reload, onDone, onClose }) {
  const [past, meaning] = BULK[verb];
  const runs = `${plural(total, "run")} in the state ${stateName(state)}`;
  const act = async () => {
    try {
      return await source.send("POST", `dead/${verb.toLowerCase()}`, { all: true, expect: total, state });
    } catch (error) {
      if (!(error instanceof ApiError) || error.problem.type !== "urn:agent-runtime:unexpected-count") throw error;
      reload();
      throw new ApiError(409, { detail: `There are no longer ${runs}. Nothing was changed. This dialog shows the new number: check it, and confirm again.` });
    }
  };
  const finished = ({ done, failed }) =>
    onDone(`${plural(done.length, "run")} ${past}${failed.length ? `, ${count(failed.length)} failed: ${failed[0].why}` : ""}`);
  return html`<${Confirm} title=${`${verb} all ${runs}`} verb=${`${verb} ${plural(total, "run")}`} danger=${verb === "Discard"}
      act=${act} onDone=${finished} onClose=${onClose}>
    <p>${meaning}</p><p>If the number of runs changes before you confirm, nothing happens.</p><//>`;
}
