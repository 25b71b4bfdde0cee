// Schedules: when each starts its next run, how its last runs ended, and pause, resume, run now and delete.
import { html, useState } from "../ui.js";
import { localTime, plural } from "../format.js";
import { Ago, Button, Confirm, Empty, Facts, Json, Loaded, Notice, PageHead, RunLink, State, Table } from "../parts.js";
import { useCan, useQuery } from "../queries.js";
import { go, href } from "../router.js";
import { source, withQuery } from "../source.js";

const MOST = 200;

export function SchedulesPage({ route }) {
  const id = route.path[1];
  const tenant = route.params.get("tenant");
  return id ? html`<${SchedulePage} key=${`${tenant}/${id}`} id=${id} tenant=${tenant} />` : html`<${List} />`;
}

/** When a schedule starts runs, in words. */
function ticksOf({ cron, every, timezone }) {
  return cron ? html`<span class="mono">${cron}</span> ${timezone}` : `every ${every} s`;
}

/** When the next run starts. */
function Next({ schedule: { paused, next_tick: next } }) {
  return paused ? html`<span class="badge">paused</span>` : next ? html`<${Ago} time=${next} />` : html`<span class="quiet">none</span>`;
}

function List() {
  const query = useQuery("schedules", { limit: MOST }, { every: 5000 });
  return html`<${PageHead} title="Schedules" note=${query.data && plural(query.data.items.length, "schedule")} />
    <${Loaded} query=${query}>${({ items, next }) => html`
      ${items.length
        ? html`<${Table} label="Schedules" head=${["Schedule", "Agent", "Ticks", "Next tick", "Last tick", "Last run", ["Skipped", "num"]]} rows=${items.map(line)} />`
        : html`<${Empty} title="There is no schedule.">A schedule starts runs at the times of a cron expression or an interval: <code>agent-runtime schedule put</code>.<//>`}
      ${next && html`<p class="quiet">The first ${MOST} schedules are shown.</p>`}`}<//>`;
}

function line(each) {
  const name = html`<a data-row class="break" href=${href(["schedules", each.id], { tenant: each.tenant })}>${each.tenant ? `${each.id} · ${each.tenant}` : each.id}</a>`;
  if (each.error) return [name, html`<span class="quiet break">${each.error}</span>`, "", "", "", "", ""];
  return [
    name, each.agent, ticksOf(each), html`<${Next} schedule=${each} />`,
    each.last_tick ? html`<${Ago} time=${each.last_tick} />` : html`<span class="quiet">none</span>`,
    each.last_run_id && (each.last_state
      ? html`<a href=${href(["runs", each.last_run_id])}><${State} state=${each.last_state} /></a>`
      : html`<span class="quiet">deleted</span>`),
    each.skipped,
  ];
}

function SchedulePage({ id, tenant }) {
  const query = useQuery(`schedules/${encodeURIComponent(id)}`, { tenant }, { every: 4000 });
  const [notice, setNotice] = useState(null);
  const done = (text) => {
    setNotice(text);
    query.reload();
  };
  return html`<${PageHead} title=${id} note=${tenant ? `Schedule of tenant ${tenant}` : "Schedule"}>
      ${query.data && html`<${Actions} schedule=${query.data} onDone=${done} />`}<//>
    <${Loaded} query=${query}>${(schedule) => html`<${Shown} schedule=${schedule} />`}<//>
    ${notice && html`<${Notice} text=${notice} onClose=${() => setNotice(null)} />`}`;
}

const CATCH_UP = { last: "the last missed tick runs", all: "all missed ticks run, at most 100", none: "missed ticks do not run" };
const OVERLAP = {
  skip: "a tick is skipped while the run before is live", queue: "a run waits for the run before",
  cancel_previous: "a tick cancels the run before",
};

function Shown({ schedule }) {
  return html`
    <section class="card"><${Facts} pairs=${[
      ["Agent", html`<a href=${href(["runs"], { agent: schedule.agent })}>${schedule.agent}</a>`], ["Ticks", ticksOf(schedule)],
      ["Next tick", html`<${Next} schedule=${schedule} />`], ["Last tick", schedule.last_tick && html`<${Ago} time=${schedule.last_tick} />`],
      ["Skipped", schedule.skipped > 0 && plural(schedule.skipped, "tick")], ["After an outage", CATCH_UP[schedule.catch_up]],
      ["Overlap", OVERLAP[schedule.overlap]], ["Tags", schedule.tags.join(", ")],
      ["Concurrency key", schedule.concurrency_key && `${schedule.concurrency_key}, ${plural(schedule.concurrency_limit, "active run")}`], ["Jitter", schedule.jitter > 0 && `up to ${schedule.jitter} s`],
      ["Start", localTime(schedule.start)], ["End", localTime(schedule.end)],
    ]} /></section>
    <section class="section"><h2>Next ticks</h2>
      ${schedule.next_ticks.length
        ? html`<ul>${schedule.next_ticks.map((each) => html`<li key=${each}><time datetime=${each} title=${localTime(each)}>${each.replace("T", " ")}</time></li>`)}</ul>`
        : html`<p class="quiet">No tick follows.</p>`}
      ${schedule.paused && html`<p class="quiet">They do not run while the schedule is paused.</p>`}</section>
    <section class="section"><h2>Last runs</h2>
      ${schedule.runs.length
        ? html`<${Table} label="Last runs" head=${["Run", "State", "Created", "Error"]} rows=${schedule.runs.map((run) => [
            html`<${RunLink} run=${run} data-row=${true} />`, html`<${State} state=${run.state} />`, html`<${Ago} time=${run.created_at} />`,
            run.error && html`<span class="break">${run.error.type}: ${run.error.message}</span>`,
          ])} />`
        : html`<p class="quiet">The store has no run of this schedule.</p>`}</section>
    <section class="section"><${Json} value=${schedule.input} label="Input" /></section>`;
}

/** The buttons for what can be done with a schedule now. Each asks for a confirmation that names it. */
function Actions({ schedule, onDone }) {
  const can = useCan();
  const [open, setOpen] = useState(null);
  const { id, tenant, paused } = schedule;
  const act = (method, ...rest) => () => source.send(method, withQuery(["schedules", id, ...rest].map(encodeURIComponent).join("/"), { tenant }));
  const actions = [
    ["Run now", can("run"), "primary", "Run the schedule now", "A run starts now, besides the ticks.", act("POST", "run"), (run) => go(["runs", run.run_id])],
    ["Pause", can("act") && !paused, "", "Pause the schedule", "No tick runs until you resume the schedule. Runs that have started go on.", act("POST", "pause"), () => onDone("The schedule is paused.")],
    ["Resume", can("act") && paused, "", "Resume the schedule", "Ticks run again, from the next tick.", act("POST", "resume"), () => onDone("The schedule was resumed.")],
    ["Delete", can("act"), "danger", "Delete the schedule", "No tick runs any more. The runs stay.", act("DELETE"), () => go(["schedules"])],
  ].filter(([, isPossible]) => isPossible);
  const [, , kind, verb, text, send, done] = actions.find(([name]) => name === open) || [];
  return html`${actions.map(([name]) => html`<${Button} key=${name} onClick=${() => setOpen(name)}>${name}<//>`)}
    ${verb && html`<${Confirm} title=${`${open}: ${id}`} verb=${verb} danger=${kind === "danger"} onClose=${() => setOpen(null)} act=${send} onDone=${done}>
      <p><strong class="break">${id}</strong>: ${text}</p><//>`}`;
}
