// One run: its head, its open questions, its actions, and the tab that the URL names.
import { html, useEffect, useState } from "../ui.js";
import { between, count, duration, localTime, runName, shortId, usd } from "../format.js";
import { href } from "../router.js";
import { isLive, useQuery } from "../queries.js";
import { runPath, source } from "../source.js";
import { Question, RunActions } from "../actions.js";
import { Timeline } from "./timeline.js";
import { EventsTab, JournalTab } from "./logs.js";
import { MessagesTab } from "./messages.js";
import { PlanTab } from "./plan.js";
import { TraceTab } from "./trace.js";
import { Ago, Empty, Facts, Failed, Json, Loading, Notice, PageHead, RunLink, State } from "../parts.js";

const TABS = { timeline: Timeline, trace: TraceTab, events: EventsTab, messages: MessagesTab, plan: PlanTab, journal: JournalTab };

export function RunPage({ route, runId, tab = "timeline" }) {
  const [every, setEvery] = useState(2000);
  const query = useQuery(runPath(runId), {}, { every });
  const [notice, setNotice] = useState(null);
  const run = query.data;
  const live = Boolean(run) && isLive(run.state);
  useEffect(() => {
    if (run) setEvery(live ? 2000 : 15000); // a finished run may be resumed elsewhere
  }, [live, !run]);
  if (!run) {
    return query.error ? html`<${PageHead} title=${shortId(runId)} /><${Failed} error=${query.error} retry=${query.reload} />` : html`<${Loading} />`;
  }
  const done = (text) => {
    setNotice(text);
    query.reload();
  };
  const Tab = Object.hasOwn(TABS, tab) && TABS[tab];
  return html`
    <${PageHead} title=${runName(run)} note=${html`<${State} state=${run.state} /><${RunsLink} filter=${{ agent: run.agent }}>${run.agent}<//>`}>
      <${RunActions} run=${run} live=${live} onDone=${done} />
    <//>
    ${query.error && html`<${Failed} error=${query.error} retry=${query.reload} />`}
    <${Why} run=${run} />
    ${(run.questions || []).map((each) => html`<${Question} key=${each.request_id} question=${each} onDone=${() => done("The answer is stored.")} />`)}
    ${run.error_info && html`<section class="run-error" aria-label="Error">
      <p><strong class="failed-title">${live ? "Last error: " : ""}${run.error_info.type}:</strong> ${run.error_info.message}</p>
      ${run.steps.length > 0 && html`<p><a href=${href(["runs", runId, "trace"], { step: "failed" })}>Show the failed call</a></p>`}
      ${run.error_info.stack && html`<details><summary>Traceback</summary><${Json} value=${run.error_info.stack} lines=${1000} /></details>`}</section>`}
    <${Facts} pairs=${factsOf(run)} />
    <${Actions} run=${run} />
    <div class="folds">${[["Input", run.input], ["Result", run.result], ["Metadata", run.metadata]].filter(([, value]) => hasValue(value)).map(([name, value]) =>
      html`<details key=${name}><summary>${name}</summary><${Json} value=${value} lines=${24} /></details>`)}</div>
    <nav class="tabs" aria-label="Parts of the run">${Object.keys(TABS).filter((name) => name === tab || run[`has_${name}`] !== false).map((name) =>
      html`<a key=${name} href=${href(["runs", runId, name])} aria-current=${name === tab ? "page" : null}>${name[0].toUpperCase() + name.slice(1)}</a>`)}</nav>
    ${Tab
      ? html`<${Tab} key=${run.run_id} run=${run} runId=${runId} route=${route} live=${live} />`
      : html`<${Empty} title="A run has no such part.">See its <a href=${href(["runs", runId])}>timeline</a>.<//>`}
    ${notice && html`<${Notice} text=${notice} onClose=${() => setNotice(null)} />`}`;
}

/** Who forked, answered, cancelled and resumed the run, and when. */
function Actions({ run: { actions = [], metadata, created_at: at } }) {
  const forked = metadata && metadata.forked_from && metadata.forked_from.by;
  const found = [...(forked ? [{ action: "fork", by: forked, at }] : []), ...actions];
  return found.length > 0 && html`<ul class="standing" aria-label="Actions of people">${found.map((each) =>
    html`<li>${DONE[each.action] || each.action} ${each.name && html`<strong class="break">${each.name}</strong> `}by <strong class="break">${each.by}</strong>, <${Ago} time=${each.at} /></li>`)}</ul>`;
}

const DONE = { fork: "Forked", answer: "Answered", cancel: "Cancelled", resume: "Resumed" };

const hasValue = (value) => value !== null && value !== undefined && (typeof value !== "object" || Object.keys(value).length > 0);

/** Why the run is where it is, in the words of the list. Its error and its open questions have their own places. */
function Why({ run }) {
  const asked = (run.questions || []).map(({ name }) => name);
  const all = Array.isArray(run.why) ? run.why : []; // a redacted file has no texts
  const why = all.filter(({ kind }) => kind !== "error" && (kind !== "question" || !asked.length));
  const isSaid = (name) => asked.includes(name) || all.some(({ text }) => text.includes(`'${name}'`));
  const lines = [
    ...why.map(({ text, run_id: id }) => (id && !source.exported ? html`<a class="break" href=${href(["runs", id])}>${text}</a>` : html`<span class="break">${text}</span>`)),
    ...run.waiting_for.filter(({ name }) => !isSaid(name)).map(({ kind, name }) => html`<span class="break">waits for the ${kind} '${name}'</span>`),
  ];
  return lines.length > 0 && html`<ul class=${isLive(run.state) ? "standing" : "standing quiet"} aria-label="Why the run is here">${lines.map((each, at) => html`<li key=${at}>${each}</li>`)}</ul>`;
}

const used = (value, limit, format) => (limit ? `${format(value || 0)} of ${format(limit)}` : format(value));

/** A link to the runs with something in common. An exported file has no list of runs. */
function RunsLink({ filter, children }) {
  return source.exported ? html`<span class="break">${children}</span>` : html`<a class="break" href=${href(["runs"], filter)}>${children}</a>`;
}

function factsOf(run) {
  const usage = run.usage || {};
  const limits = run.limits || {};
  const forked = run.metadata && run.metadata.forked_from;
  const conversation = run.conversation_id;
  return [
    ["Run id", html`<span class="mono">${run.run_id}</span>`],
    ["Tenant", run.tenant && html`<${RunsLink} filter=${{ tenant: run.tenant }}>${run.tenant}<//>`],
    ["Created", html`<${Ago} time=${run.created_at} />`],
    ["Started", run.started_at && html`<${Ago} time=${run.started_at} />`],
    ["Duration", between(run.started_at, run.ended_at)],
    ["Attempt", run.attempt],
    ["Generation", run.generation > 1 && run.generation],
    ["Worker", run.worker],
    ["Tokens", used(usage.total_tokens, limits.max_tokens, count)],
    ["Cost", used(usage.cost_usd, limits.max_cost_usd, usd)],
    ["Model calls", used(usage.turns, limits.max_turns, count)],
    ["Tool calls", used(usage.tool_calls, limits.max_tool_calls, count)],
    ["Time limit", limits.max_seconds && duration(limits.max_seconds)],
    ["Conversation", conversation && html`<${RunsLink} filter=${{ conversation }}>${shortId(conversation)}<//>`],
    ["Parent", run.parent && html`<${RunLink} run=${{ run_id: run.parent }} />`],
    ["Child runs", run.children.length > 0 && html`${run.children.slice(0, 5).map((each) => html`<${State} key=${each.run_id} state=${each.state}><${RunLink} run=${each} /><//> `)}
      ${run.children.length > 5 && html`<${RunsLink} filter=${{ parent: run.run_id }}>all ${count(run.children.length)}<//>`}`],
    ["Forked from", forked && forked.run_id && html`<${RunLink} run=${{ run_id: forked.run_id }} /> <span class="quiet">after ${forked.step || "all steps"}${forked.by && ` by ${forked.by}`}</span>`],
    ["Deadline", run.deadline && localTime(run.deadline)],
    ["Concurrency key", run.concurrency_key],
    ["Priority", run.priority || null],
  ];
}
