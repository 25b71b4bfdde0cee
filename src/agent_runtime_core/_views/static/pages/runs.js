// The lists of runs: all of them, with filters in the URL, and those that finished without a result.
import { html, useContext, useEffect, useRef, useState } from "../ui.js";
import { count, duration, localTime, plural, shortId, stateName, usd } from "../format.js";
import { Queue, isLive, useCan } from "../queries.js";
import { Button, Confirm, Empty, Field, Notice, PageHead, Select, StateCounts } from "../parts.js";
import { go, href } from "../router.js";
import {
  AgeCell, BULK, BulkDialog, REPAIRABLE, RunCell, RunTable, StateCell, useLiveList, useSelection,
} from "../run_table.js";
import { ApiError, source } from "../source.js";

const STATES = ["pending", "running", "waiting", "retrying", "in_doubt", "succeeded", "failed", "dead", "timed_out", "cancelled"];
const FILTERS = ["q", "state", "agent", "since", "until", "parent", "conversation", "tenant"];
const HEAD = [["State", "cell-state"], ["Run", "cell-main"], ["Age", "num cell-age"], ["Duration", "num"], ["Attempt", "num"], ["Tokens", "num"], ["Cost", "num"]];

function filtersOf(params) {
  return Object.fromEntries(FILTERS.map((name) => [name, params.getAll(name)]).filter(([, values]) => values.length));
}

export function RunsPage({ route }) {
  const filters = filtersOf(route.params);
  const list = useLiveList("runs", filters);
  const { data: queue } = useContext(Queue);
  const filtered = Object.keys(filters).length > 0;
  const change = (changes) => go(["runs"], { ...filters, ...changes }, { replace: true });
  const empty = html`<${Empty} title=${filtered ? "No run matches these filters." : "The store has no runs."}>
    ${filtered ? html`<a href=${href(["runs"])}>Show all runs</a>` : "They appear here as soon as they are submitted."}<//>`;
  return html`
    <${PageHead} title="Runs" />
    <div class="counts" role="group" aria-label="Runs in the store">${queue && html`<span><strong class="num">${count(queue.total)}</strong> in the store</span>
      <${StateCounts} states=${STATES} counts=${queue.by_status} />`}</div>
    <${Filters} filters=${filters} change=${change} agents=${Object.keys(queue ? queue.by_agent : {})}
      tenants=${[...new Set(list.items.map((run) => run.tenant))]} />
    <${Listed} list=${list} filters=${filters} change=${change} />
    <${Runs} key=${list.key} list=${list} empty=${empty} />`;
}

function Filters({ filters, change, agents, tenants }) {
  const [q] = filters.q || [""];
  const [agent] = filters.agent || [""];
  const [tenant] = filters.tenant || [""];
  const chosen = filters.state || [];
  const [text, setText] = useState(q);
  const latest = useRef(change);
  latest.current = change;
  useEffect(() => setText(q), [q]); // the filters may be changed by a link, too
  useEffect(() => {
    const timer = setTimeout(() => text !== q && latest.current({ q: text }), 250);
    return () => clearTimeout(timer);
  }, [text]);
  // Times in the time zone of the browser; the URL has them in UTC.
  const time = (name, label) => html`<${Field} label=${label}><input type="datetime-local"
    value=${filters[name] ? localTime(filters[name][0]).replace(" ", "T") : ""}
    onChange=${(event) => change({ [name]: event.target.value && new Date(event.target.value).toISOString() })} /><//>`;
  return html`<div class="filters" role="search">
    <input type="search" aria-label="Run id or key begins with" placeholder="Run id or key" value=${text}
      onInput=${(event) => setText(event.target.value)} />
    <${Select} label="State" value="" onChange=${(state) => change({ state: [...chosen, state] })}
      options=${[["", chosen.length ? "Add a state" : "All states"], ...STATES.filter((each) => !chosen.includes(each)).map((each) => [each, stateName(each)])]} />
    <${Select} label="Agent" value=${agent} onChange=${(each) => change({ agent: each })}
      options=${[["", "All agents"], ...[...new Set([...agents, ...(filters.agent || [])])].map((each) => [each, each])]} />
    ${(tenant || tenants.length > 1) && html`<${Select} label="Tenant" value=${tenant} onChange=${(each) => change({ tenant: each })}
      options=${[["", "All tenants"], ...[...new Set([...tenants, tenant])].filter(Boolean).map((each) => [each, each])]} />`}
    ${time("since", "Created from")}${time("until", "Created before")}
  </div>`;
}

function chipText(name, value) {
  if (name === "parent") return `child runs of ${shortId(value)}`;
  return `${name} ${name === "state" ? stateName(value) : value}`;
}

/** How many rows are listed, and the filters that have no field above. */
function Listed({ list, filters, change }) {
  const chips = ["state", "parent", "conversation"].flatMap((name) => (filters[name] || []).map((value) => [name, value]));
  const number = plural(list.items.length, "run");
  return html`<div class="listed"><span class="quiet" role="status">${!list.loading && `${list.complete ? number : `The newest ${number}`} listed`}</span>
    ${chips.map(([name, value]) => html`<button key=${name + value} type="button" class="chip" title="Remove this filter"
      onClick=${() => change({ [name]: filters[name].filter((each) => each !== value) })}>
      <span class="cut">${chipText(name, value)}</span><span aria-hidden="true">×</span></button>`)}
    ${Object.keys(filters).length > 0 && html`<a href=${href(["runs"])}>Remove all filters</a>`}
  </div>`;
}

const cells = (run) => html`
  <${StateCell} run=${run} /><${RunCell} run=${run} /><${AgeCell} time=${run.created_at} />
  ${[duration(run.duration_seconds), run.attempt, count(run.tokens), usd(run.cost_usd)].map((text) => html`<span role="cell" class="num">${text}</span>`)}`;

function Runs({ list, empty }) {
  const can = useCan();
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
    <${RunTable} list=${list} head=${HEAD} cells=${cells} selection=${can("act") || can("admin") ? selection : null} actions=${actions}
      kind="runs-table" label="Runs" empty=${empty} />
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
