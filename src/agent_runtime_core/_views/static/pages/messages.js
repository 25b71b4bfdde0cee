// The conversation of a run as a chat: tool calls with their results.
import { html, useEffect, useMemo, useState } from "../ui.js";
import { count } from "../format.js";
import { usePages } from "../queries.js";
import { parsed, runPath } from "../source.js";
import { Button, Empty, Json, LoadedList, State } from "../parts.js";

const SHOWN = 100;

/** Pair the calls of tools with their results. Returns [{ message, results }]. */
function paired(messages) {
  const turns = [];
  const open = new Map();
  for (const message of messages) {
    const id = message.tool_call_id;
    if (message.role === "tool" && open.has(id)) {
      open.get(id).results.set(id, message);
      open.delete(id);
      continue;
    }
    const turn = { message, results: new Map() };
    for (const each of message.tool_calls || []) open.set(each.id, turn);
    turns.push(turn);
  }
  return turns;
}

export function MessagesTab({ run, runId, live }) {
  const list = usePages(runPath(runId, "messages"), { limit: 1000 }, { cursor: "after", every: live ? 2000 : 0 });
  const [shown, setShown] = useState(SHOWN);
  useEffect(() => list.more(), [list.items]);
  const turns = useMemo(() => paired(list.items), [list.items]);
  const hidden = Math.max(turns.length - shown, 0);
  return html`<${LoadedList} list=${list} empty=${html`<${Empty} title="The run has no messages.">Agents that call no model have none.<//>`}>
    <div class="chat" role="log" aria-label="Messages">
      ${hidden > 0 && html`<${Button} onClick=${() => setShown(shown + SHOWN)}>Show ${count(Math.min(hidden, SHOWN))} of ${count(hidden)} earlier messages<//>`}
      ${turns.slice(hidden).map((turn, index) => html`<${Turn} key=${hidden + index} turn=${turn} open=${live ? run.state : null} />`)}
    </div><//>`;
}

function Turn({ turn, open }) {
  const { role, name, content, invalidated, tool_calls: calls } = turn.message;
  const text = html`<${Content} content=${content} />`;
  if (role === "system" || role === "developer") return html`<details class="quiet"><summary>${role} prompt</summary>${text}</details>`;
  return html`<article class=${role === "user" ? "card from-user" : "card"}>
    <header class="page-note">${name ? `${role}: ${name}` : role}${invalidated && html` <span class="badge">invalidated by a retry</span>`}</header>
    ${invalidated ? html`<del>${text}</del>` : text}
    ${(calls || []).map((call) => html`<${Call} key=${call.id} call=${call} result=${turn.results.get(call.id)} open=${open} />`)}
  </article>`;
}

/** A call and its result. `open` is the state of a call without a result: that of the run while it is live. */
function Call({ call, result, open }) {
  const made = call.function || call;
  const failed = result && result.metadata && result.metadata.is_error;
  const state = !result ? open || "cancelled" : failed ? "failed" : "done";
  return html`<section class="call" aria-label=${`Call of ${made.name}`}>
    <header class="page-note"><code class="break strong">${made.name}</code> <${State} state=${state}>${!result && (open ? "no result yet" : "no result")}<//></header>
    <${Json} value=${inside(made.arguments)} label="Arguments" />
    ${result && html`<${Json} value=${inside(result.content)} label=${failed ? "Error" : "Result"} />`}
  </section>`;
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

/** A string, or a list of parts. Nothing is loaded from other hosts, so an image is the JSON of its part. */
function Content({ content }) {
  if (Array.isArray(content)) return content.map((part, index) => html`<${Content} key=${index} content=${partText(part) ?? part} />`);
  return typeof content === "string" ? html`<div class="text">${content}</div>` : html`<${Json} value=${content} />`;
}
