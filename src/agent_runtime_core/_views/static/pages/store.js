// The small pages about the whole store: the queue, usage, agents, and what the store is.
import { html, useContext, useMemo, useState } from "../ui.js";
import { SchemaFields, valueOf } from "../actions.js";
import { count, localTime, plural, stateName, usd } from "../format.js";
import {
  Ago, Button, Confirm, Empty, Facts, Field, Form, Json, Loaded, PageHead, RunLink, Select, State, StateCounts, Table,
} from "../parts.js";
import { About, Queue, useCan, useQuery } from "../queries.js";
import { go, href } from "../router.js";
import { source } from "../source.js";

// -- The queue: how many runs wait for what, and concurrency keys.
const STATES = ["pending", "running", "waiting", "succeeded", "failed", "timed_out", "cancelled", "dead"];

export function QueuePage() {
  return html`<${PageHead} title="Queue" />
    <${Loaded} query=${useContext(Queue)}>${(queue) => html`
      <${Facts} pairs=${[
        ["Oldest pending run", queue.oldest_pending_at && html`<${Ago} time=${queue.oldest_pending_at} />`],
        ["Due later", count(queue.due_later)],
        ...Object.entries(queue.waiting).map(([word, number]) => [`Waiting: ${stateName(word)}`, count(number)]),
      ]} />
      <${Depth} queue=${queue} /><${Keys} queue=${queue} /><p class="section">See the <a href=${href(["workers"])}>workers</a> and their leases.</p>`}<//>`;
}

function Depth({ queue }) {
  const states = STATES.filter((state) => queue.by_status[state]);
  const rows = Object.entries(queue.by_agent).sort(([a], [b]) => a.localeCompare(b));
  if (!rows.length) return html`<${Empty} title="The store has no runs." />`;
  return html`<section class="section"><h2>Runs by agent and state</h2>
    <${Table} label="Runs by agent and state" head=${["Agent", ...states.map((state) => [html`<${State} state=${state} />`, "num"])]}
      rows=${rows.map(([agent, counts]) => [
        html`<a data-row href=${href(["runs"], { agent })}>${agent}</a>`,
        ...states.map((state) => (counts[state] ? html`<a href=${href(["runs"], { agent, state })}>${count(counts[state])}</a>` : "–")),
      ])} /></section>`;
}

function Keys({ queue }) {
  return html`<section class="section"><h2>Concurrency keys</h2>
    ${queue.concurrency_keys.length
      ? html`<${Table} label="Concurrency keys" head=${["Key", "Active run", "State", ["Queued", "num"]]} rows=${queue.concurrency_keys.map((each) => [
          each.tenant ? `${each.concurrency_key} · ${each.tenant}` : each.concurrency_key, each.run_id ? html`<${RunLink} run=${each} />` : "none", each.state && html`<${State} state=${each.state} />`, count(each.queued),
        ])} />`
      : html`<p class="quiet">No run has a concurrency key.</p>`}
    ${!queue.complete && html`<p class="quiet">From the first 400 runs of each state.</p>`}</section>`;
}

// -- Tokens and cost by agent, tenant, model or day.
const BY = { agent: "Agent", tenant: "Tenant", model: "Model", day: "Day (UTC)" };
const DAY = 86400e3; // milliseconds
const DAYS = { 1: "24 hours", 7: "7 days", 30: "30 days", 90: "90 days" };

export function UsagePage({ route }) {
  const known = (name, options, other) => (Object.hasOwn(options, route.params.get(name)) ? route.params.get(name) : other);
  const by = known("by", BY, "agent");
  const days = known("days", DAYS, "30");
  const unit = by === "day" ? DAY : 1; // no row has a part of a day
  const since = useMemo(() => new Date(Math.floor((Date.now() - days * DAY) / unit) * unit).toISOString(), [days, unit]);
  const query = useQuery("usage", { by, since });
  const select = (label, name, options, value) => html`<${Select} label=${label} options=${Object.entries(options)} value=${value}
    onChange=${(each) => go(["usage"], { by, days, [name]: each }, { replace: true })} />`;
  return html`<${PageHead} title="Usage" note="Runs that were created in this time" />
    <div class="filters">${select("Group by", "by", BY, by)}${select("Time", "days", DAYS, days)}</div>
    <${Loaded} query=${query}>${(usage) => html`<${Totals} usage=${usage} by=${by} />`}<//>`;
}

function Totals({ usage, by }) {
  const { items, total } = usage;
  if (!items.length) return html`<${Empty} title="No usage in this time.">${by === "model" ? "No run called a model." : "No run was created."}<//>`;
  const numbers = (each) => [usd(each.cost_usd), count(each.tokens), count(each.runs)];
  return html`
    ${!usage.complete && html`<p class="note" role="note">Not all runs are counted. These numbers are of the runs
      since ${localTime(usage.since)}. Choose a shorter time to have all of them.</p>`}
    <${Table} label="Usage" head=${[BY[by], ["Cost", "num"], ["Tokens", "num"], ["Runs", "num"]]}
      rows=${items.map((each) => [html`<${Name} by=${by} name=${each[by]} />`, ...numbers(each)])} foot=${["Total", ...numbers(total)]} />
    <p class="quiet">${by === "model" ? "Each model call counts, also of runs that have not finished." : "Only finished runs have tokens and a cost."}</p>`;
}

function Name({ by, name }) {
  if (by === "model" || !name) return name || "no tenant";
  const since = `${name}T00:00:00Z`;
  const filter = by !== "day" ? { [by]: name } : { since, until: new Date(Date.parse(since) + DAY).toISOString() };
  return html`<a data-row href=${href(["runs"], filter)}>${name}</a>`;
}

// -- The agents of this server, with their tools and numbers of runs.
export function AgentsPage() {
  const query = useQuery("agents", {}, { every: 15000 });
  const [chosen, setChosen] = useState(null);
  const can = useCan();
  const registered = query.data ? query.data.items.filter((each) => each.registered).length : 0; // none in a file that is only read
  return html`<${PageHead} title="Agents" note=${registered > 0 && plural(registered, "registered agent")} />
    <${Loaded} query=${query}>${({ items }) => items.length
      ? items.map((agent) => html`<${Agent} key=${agent.key} agent=${agent} missing=${registered > 0 && !agent.registered} submit=${can("run") && agent.registered && (() => setChosen(agent))} />`)
      : html`<${Empty} title="No agent is registered.">Pass a registry to <code>agent-runtime serve</code>.<//>`}<//>
    ${chosen && html`<${NewRun} agent=${chosen} onClose=${() => setChosen(null)} />`}`;
}

function Agent({ agent, missing, submit }) {
  return html`<article class="card">
    <header class="page-head"><h2><a data-row href=${href(["runs"], { agent: agent.key })}>${agent.key}</a></h2>
      ${missing && html`<span class="badge" title="Its runs are in the store, and this server cannot execute them">not registered here</span>`}
      ${submit && html`<div class="page-actions"><${Button} kind="small" onClick=${submit} aria-label=${`Submit a run of ${agent.key}`}>Submit a run<//></div>`}</header>
    ${agent.description && html`<p class="quiet">${agent.description}</p>`}
    <div class="counts"><${StateCounts} states=${STATES} counts=${agent.runs} filter=${{ agent: agent.key }} /></div>
    ${agent.tools.length > 0 && html`<details><summary>${plural(agent.tools.length, "tool")}</summary><${Json} value=${agent.tools} lines=${40} /></details>`}
  </article>`;
}

// -- Submit a run: a form from the input schema of the agent, or JSON if it has none.
/** The agent that plans a prompt: it takes the form of `POST runs` without an agent. */
const PLANNER = "orchestrator";

/** Return the body of the request. */
function bodyOf(agent, form) {
  if (agent.key === PLANNER) return { prompt: form.get("prompt") };
  const input = valueOf(agent.input_schema, form, "input", "The input", false) ?? {};
  if (typeof input !== "object" || input === null || Array.isArray(input)) throw new Error("The input must be a JSON object.");
  return { agent: agent.key, input, run_id: form.get("run_id").trim() || undefined };
}

function NewRun({ agent, onClose }) {
  // The run may have been stored although its response was lost.
  const key = useMemo(() => `page-${Date.now().toString(36)}-${Math.random().toString(36).slice(2)}`, []);
  const act = async (form) => {
    const body = bodyOf(agent, new FormData(form));
    return source.send("POST", "runs", body, body.run_id ? {} : { "Idempotency-Key": key });
  };
  return html`<${Confirm} title=${`New run of ${agent.key}`} verb="Submit the run" onClose=${onClose}
      act=${act} onDone=${(run) => go(["runs", run.run_id])}>
    ${agent.key === PLANNER
      ? html`<${Field} label="Prompt"><textarea name="prompt" required></textarea><//>`
      : html`<${SchemaFields} schema=${agent.input_schema} field="input" label="Input" />
          <${Field} label=${html`Run key <span class="quiet">optional</span>`} hint="A second run with the same key is not submitted"><input name="run_id" autocomplete="off" maxlength="512" /><//>`}
  <//>`;
}

// -- The store, the versions, and what the reader may do.
const DURABILITY = {
  full: "full: each commit is on the disk before it counts",
  normal: "normal: a power failure may lose the last commits",
};

export function AboutPage() {
  const about = useContext(About);
  const leave = async () => {
    await source.send("DELETE", "session");
    location.hash = "";
    location.reload(); // nothing that was read stays in this tab
  };
  return html`<${PageHead} title="About" />
    <section class="card"><${Facts} pairs=${[
      ["Store", about.store && html`<span class="mono">${about.store}</span>`], ["Backend", about.backend],
      ["Durability", DURABILITY[about.durability] || about.durability],
      ["Access", about.read_only ? "read-only: this page changes nothing" : "read and write"],
      ["agent-runtime-core", about.version], ["Python", about.python], ["SQLite", about.sqlite],
      ["You may", (about.scopes || []).join(", ")],
      ["Live updates", { stream: "as a stream", poll: "by polling" }[about.live]],
    ]} /></section>
    ${about.signed_in && html`<${Form} verb="Sign out" act=${leave} />`}`;
}
