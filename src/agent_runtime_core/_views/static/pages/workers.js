// The processes that claim runs, also idle ones, with their leases; and the agents that none of them has registered.
import { html, useContext } from "../ui.js";
import { ago, count, localTime, plural, secondsOf } from "../format.js";
import { Ago, Empty, Loaded, PageHead, State, Table } from "../parts.js";
import { Queue, useQuery } from "../queries.js";
import { href } from "../router.js";

const LIVE = ["pending", "running", "waiting"];

export function WorkersPage() {
  const query = useQuery("workers", {}, { every: 4000 });
  const { data: queue } = useContext(Queue);
  const living = query.data ? query.data.items.filter((each) => each.living) : [];
  return html`<${PageHead} title="Workers" note=${query.data && plural(living.length, "living worker")} />
    ${query.data && queue && html`<${Unknown} queue=${queue} living=${living} />`}
    <${Loaded} query=${query}>${({ items }) => html`<${Processes} items=${items} queue=${queue} />`}<//>
    ${queue && html`<${Leases} workers=${queue.workers} />`}`;
}

/** Agents that have live runs and that no living process executes: their runs wait until one is started. */
function Unknown({ queue, living }) {
  const known = new Set(living.filter((each) => each.slots > 0).flatMap((each) => each.agents));
  const unknown = Object.entries(queue.by_agent).filter(([agent, counts]) => !known.has(agent) && LIVE.some((state) => counts[state]));
  return unknown.length > 0 && html`<section class="section"><h2>Agents that no worker knows</h2>
    <p class="quiet tools">No living process executes these runs. Start a worker with these agents.</p>
    <${Table} label="Agents that no worker knows" head=${["Agent", ...LIVE.map((state) => [html`<${State} state=${state} />`, "num"])]}
      rows=${unknown.sort(([a], [b]) => a.localeCompare(b)).map(([agent, counts]) => [html`<a data-row href=${href(["runs"], { agent })}>${agent}</a>`,
        ...LIVE.map((state) => (counts[state] ? html`<a href=${href(["runs"], { agent, state })}>${count(counts[state])}</a>` : "–"))])} /></section>`;
}

/** What a process does: it executes runs, it is idle, it executes only runs of its own program, or it has ended. */
function Doing({ process: { living, slots }, runs }) {
  if (!living) return html`<${State} state="failed">not seen<//>`;
  if (runs) return html`<${State} state="running">${slots ? `${count(runs)} of ${plural(slots, "slot")}` : plural(runs, "run")}<//>`;
  return slots ? html`<${State} state="pending">idle, ${plural(slots, "slot")}<//>` : html`<span class="quiet">claims no runs</span>`;
}

function Processes({ items, queue }) {
  const runs = Object.fromEntries((queue ? queue.workers : []).map((each) => [each.worker, each.runs]));
  return html`<section class="section"><h2>Processes</h2>
    ${items.length
      ? html`<${Table} label="Processes" head=${["Worker", "State", "Host", "Agents", "Version", "Started", "Last seen"]} rows=${items.map((each) => [
          html`<span class="break">${each.worker}</span>`, html`<${Doing} process=${each} runs=${runs[each.worker]} />`,
          html`<span class="break">${each.host}</span> <span class="quiet num">${each.pid}</span>`,
          html`<details><summary>${plural(each.agents.length, "agent")}</summary>${each.agents.map((agent) => html`<div key=${agent}><a href=${href(["runs"], { agent })}>${agent}</a></div>`)}</details>`,
          each.version, html`<${Ago} time=${each.started_at} />`, html`<${Ago} time=${each.last_seen_at} />`,
        ])} />`
      : html`<${Empty} title="No process is listed.">A process appears here when it claims runs: <code>agent-runtime worker</code>.<//>`}</section>`;
}

/** The leases of the workers that execute runs. A worker of an earlier version is listed only here. */
export function Leases({ workers }) {
  return html`<section class="section"><h2>Leases</h2>
    ${workers.length
      ? html`<${Table} label="Leases" head=${["Worker", ["Runs", "num"], "Agents", "First lease ends"]} rows=${workers.map((each) => [
          each.worker, count(each.runs), Object.entries(each.agents).map(([agent, runs]) => (runs > 1 ? `${agent} × ${runs}` : agent)).join(", "), html`<${Lease} worker=${each} />`,
        ])} />`
      : html`<p class="quiet">No worker executes a run now.</p>`}</section>`;
}

/** A lease that ended without being renewed: the worker is gone, and another one will resume its runs. */
function Lease({ worker: { lease_ends_at: end, expired } }) {
  if (!end) return html`<span class="quiet">no end while the run waits in memory</span>`;
  return html`<time title=${localTime(end)}>${secondsOf(end) * 1000 > Date.now() - 1000 ? localTime(end).slice(11) : ago(end)}</time>
    ${expired > 0 && html` <span class="badge is-failed">${plural(expired, "expired lease")}</span>`}`;
}
