// The conversation of a run as a chat: Markdown, tool calls with their results, and the text that a model writes now.
import { html, useContext, useEffect, useMemo, useRef, useState } from "../ui.js";
import { count } from "../format.js";
import { Markdown } from "../markdown.js";
import { About, followEvents, usePages } from "../queries.js";
import { href } from "../router.js";
import { parsed, runPath } from "../source.js";
import { Button, Check, Empty, Json, LoadedList, State } from "../parts.js";

const SHOWN = 100;
const STREAMED = ["assistant.*", "run.*"];
const RESTARTS = ["run.started", "run.resumed"]; // the text of a call that has not ended is then streamed again

/** Pair the calls of tools with their results. Returns [{ message, step, results }]. */
function paired(items) {
  const turns = [];
  const open = new Map();
  for (const { message, step } of items) {
    const id = message.tool_call_id;
    if (message.role === "tool" && open.has(id)) {
      open.get(id).results.set(id, { result: message, step });
      open.delete(id);
      continue;
    }
    const turn = { message, step, results: new Map() };
    for (const each of message.tool_calls || []) open.set(each.id, turn);
    turns.push(turn);
  }
  return turns;
}

const withSteps = ({ items, step_ids: steps = [] }) => items.map((message, index) => ({ message, step: steps[index] ?? null }));

/** The texts that model calls are writing: [[step id or "", text], …]. */
function useStreamed(runId, live) {
  const about = useContext(About);
  const { current: texts } = useRef(new Map());
  const [, setTurn] = useState(0);
  useEffect(() => {
    if (!live || about.live === "none") return undefined;
    texts.clear();
    const onEvents = (events) => {
      for (const { type, payload, from_agent: byAgent } of events) {
        const step = typeof payload.step_id === "string" ? payload.step_id : "";
        if (RESTARTS.includes(type) && !byAgent) texts.clear();
        else if (type === "assistant.message") texts.delete("");
        else if (type === "assistant.delta" && typeof payload.delta === "string") texts.set(step, (texts.get(step) || "") + payload.delta);
      }
      setTurn((before) => before + 1);
    };
    return followEvents(about, runId, -1, { types: STREAMED, onEvents, onState: () => {} });
  }, [runId, live]);
  return live ? [...texts] : [];
}

export function MessagesTab({ run, runId, live }) {
  const list = usePages(runPath(runId, "messages"), { limit: 1000 }, { cursor: "after", every: live ? 2000 : 0, itemsOf: withSteps });
  const [shown, setShown] = useState(SHOWN);
  const [written, setWritten] = useState(false);
  useEffect(() => list.more(), [list.items]);
  const turns = useMemo(() => paired(list.items), [list.items]);
  const answered = useMemo(() => new Set(list.items.map((each) => !each.message.invalidated && each.step)), [list.items]);
  const streamed = useStreamed(runId, live).filter(([step, text]) => text && !answered.has(step));
  const hidden = Math.max(turns.length - shown, 0);
  const common = { runId, written, open: live ? run.state : null };
  const empty = html`<${Empty} title="The run has no messages.">Agents that call no model have none.<//>`;
  return html`
    <div class="tools"><${Check} on=${written} onChange=${setWritten}>Show Markdown as it was written<//></div>
    <${LoadedList} list=${list} empty=${!streamed.length && empty}>
    <div class="chat" role="log" aria-label="Messages">
      ${hidden > 0 && html`<${Button} onClick=${() => setShown(shown + SHOWN)}>Show ${count(Math.min(hidden, SHOWN))} of ${count(hidden)} earlier messages<//>`}
      ${turns.slice(hidden).map((turn, index) => html`<${Turn} key=${hidden + index} turn=${turn} ...${common} />`)}
    </div><//>
    ${streamed.map(([step, text]) => html`<article key=${step} class="card chat" aria-label="Answer that is being written" aria-busy="true">
      <header class="page-note">assistant <${State} state="running">writes<//></header><${Text} text=${text} written=${written} /></article>`)}`;
}

const traceOf = (runId, step) => step && html`<a href=${href(["runs", runId, "trace"], { step })}>Trace</a>`;

function Turn({ turn, runId, written, open }) {
  const { role, name, content, invalidated, tool_calls: calls } = turn.message;
  const text = html`<${Content} content=${content} written=${written} />`;
  if (role === "system" || role === "developer") return html`<details class="quiet"><summary>${role} prompt</summary>${text}</details>`;
  return html`<article class=${role === "user" ? "card from-user" : "card"}>
    <header class="page-note">${name ? `${role}: ${name}` : role}${invalidated && html` <span class="badge">invalidated by a retry</span>`} ${traceOf(runId, turn.step)}</header>
    ${invalidated ? html`<del>${text}</del>` : text}
    ${(calls || []).map((call) => html`<${Call} key=${call.id} call=${call} ...${turn.results.get(call.id)} runId=${runId} open=${open} />`)}
  </article>`;
}

/** A call and its result, folded. `open` is the state of a call without a result: the state of the run while it is live. */
function Call({ call, result, step, runId, open }) {
  const made = call.function || call;
  const given = inside(made.arguments);
  const failed = result && result.metadata && result.metadata.is_error;
  const state = !result ? open || "cancelled" : failed ? "failed" : "done";
  return html`<details class="call" aria-label=${`Call of ${made.name}`}>
    <summary data-row><code class="break strong">${made.name}</code> <span class="quiet break">${brief(given)}</span> <${State} state=${state}>${!result && (open ? "no result yet" : "no result")}<//></summary>
    <div class="call-body"><${Json} value=${given} label="Arguments" />
    ${result && html`<${Json} value=${inside(result.content)} label=${failed ? "Error" : "Result"} />`}
    ${traceOf(runId, step)}</div>
  </details>`;
}

/** The beginning of the arguments of a call, in one line. */
function brief(value) {
  const text = value && typeof value === "object" ? Object.entries(value).map(([name, each]) => `${name}: ${JSON.stringify(each)}`).join(", ") : String(value ?? "");
  return text.length > 90 ? `${text.slice(0, 90)}…` : text;
}

/** JSON that is inside a string as a value; any other text as it is. */
function inside(value) {
  try {
    return typeof value === "string" && /^\s*[[{]/.test(value) ? parsed(value) : value;
  } catch {
    return value;
  }
}

const partText = (part) => (typeof part === "string" ? part : part && typeof part.text === "string" ? part.text : null);

function Text({ text, written }) {
  return written ? html`<div class="text">${text}</div>` : html`<${Markdown} text=${text} />`;
}

/** A string, or a list of parts. Nothing is loaded from other hosts, so an image is the JSON of its part. */
function Content({ content, written }) {
  if (Array.isArray(content)) return content.map((part, index) => html`<${Content} key=${index} content=${partText(part) ?? part} written=${written} />`);
  const value = written ? content : inside(content);
  return typeof value === "string" ? html`<${Text} text=${value} written=${written} />` : html`<${Json} value=${value} />`;
}
