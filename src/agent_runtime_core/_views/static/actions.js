// The actions on one run, each with a confirmation that names the run, and the answers to its questions.
import { html, useMemo, useState } from "./ui.js";
import { runName, shortId, stateName } from "./format.js";
import { Ago, Button, Confirm, Failed, Field, Form, Json, State } from "./parts.js";
import { useCan, usePages } from "./queries.js";
import { go, href } from "./router.js";
import { parsed, runPath, source } from "./source.js";

/** Return the JSON in a text field. An empty field is undefined. */
function parsedJson(text, label) {
  if (!text.trim()) return undefined;
  try {
    return parsed(text);
  } catch (error) {
    throw new Error(`${label} must be JSON: ${error.message}`);
  }
}

/** Return the kind of field that a schema needs: enum, string, number, integer, boolean, object or json. */
function kindOf(schema) {
  if (!schema || typeof schema !== "object") return "json";
  if (Array.isArray(schema.enum)) return "enum";
  const types = [].concat(schema.type || []).filter((each) => each !== "null");
  if (types.length !== 1) return "json";
  if (types[0] === "object") return Object.keys(schema.properties || {}).length ? "object" : "json";
  return ["string", "number", "integer", "boolean"].includes(types[0]) ? types[0] : "json";
}

/** The fields of an object: [schema, name of the field, label, whether it is required]. */
function fieldsOf(schema, field) {
  return Object.entries(schema.properties).map(([name, each]) => [each, `${field}/${name}`, (each && each.title) || name, (schema.required || []).includes(name)]);
}

/** Return the value that the fields of a form have. An optional field that is empty is left out. */
export function valueOf(schema, form, field, label, required = true) {
  const kind = kindOf(schema);
  if (kind === "object") {
    const values = fieldsOf(schema, field).map((each) => [each[1].slice(field.length + 1), valueOf(each[0], form, each[1], each[2], each[3])]);
    return Object.fromEntries(values.filter(([, value]) => value !== undefined));
  }
  const text = form.get(field) || "";
  if (kind === "string") return text || (required ? "" : undefined);
  // A number field accepts ".5" and "1.", which are no JSON.
  const value = kind === "number" && text.includes(".") && isFinite(text) ? Number(text) : parsedJson(text, label);
  if (value === undefined && required) throw new Error(`${label} must not be empty.`);
  return value;
}

/** The fields of a schema, for a form that `valueOf` reads. */
export function SchemaFields({ schema, field, label, required = true }) {
  const kind = kindOf(schema);
  if (kind === "object") {
    return fieldsOf(schema, field).map((each) => html`<${SchemaFields} key=${each[1]} schema=${each[0]} field=${each[1]} label=${each[2]} required=${each[3]} />`);
  }
  const { description, default: start, maxLength, minimum, maximum } = schema || {};
  const title = required ? label : html`${label} <span class="quiet">optional</span>`;
  if (kind === "enum" || kind === "boolean") {
    return html`<fieldset class="field"><legend class="label">${title}</legend>
      <div class="tools">${(schema.enum || [true, false]).map((value) => html`<label key=${value} class="check"><input type="radio" name=${field}
        value=${JSON.stringify(value)} required=${required} defaultChecked=${value === start} />${wordOf(value)}</label>`)}</div>
      ${description && html`<span class="quiet small">${description}</span>`}</fieldset>`;
  }
  const text = start === undefined ? "" : kind === "string" ? String(start) : JSON.stringify(start);
  return html`<${Field} label=${title} hint=${description || (kind === "json" && "JSON")}>
    ${kind === "json"
      ? html`<textarea name=${field} spellcheck="false" defaultValue=${text}></textarea>`
      : kind === "string"
        ? html`<input name=${field} autocomplete="off" maxlength=${maxLength} defaultValue=${text} />`
        : html`<input name=${field} type="number" required=${required} step=${kind === "integer" ? 1 : "any"} min=${minimum} max=${maximum} defaultValue=${text} />`}
  <//>`;
}

function wordOf(value) {
  if (typeof value === "boolean") return value ? "Yes" : "No";
  return typeof value === "string" ? stateName(value) : JSON.stringify(value);
}

/** Whether the question is "yes or no": an agent that names no schema takes true and false, and so may one of several schemas. */
export function isYesOrNo(schema) {
  return !schema || (schema.anyOf || []).some((each) => kindOf(each) === "boolean") || kindOf(schema) === "boolean" || Object.keys(schema).every((each) => each === "title" || each === "description");
}

/** The form that answers a question. It asks for a confirmation. `onDone` is called when the answer is stored. */
function AnswerForm({ question, onDone }) {
  const { schema, name } = question;
  const [asJson, setAsJson] = useState(false);
  const [answer, setAnswer] = useState(undefined);
  const act = async (form) => setAnswer(valueOf(asJson ? null : schema, new FormData(form), "answer", "The answer"));
  return html`
    ${isYesOrNo(schema) && !asJson
      ? html`<div class="tools"><${Button} kind="primary" onClick=${() => setAnswer(true)}>Approve<//><${Button} kind="danger" onClick=${() => setAnswer(false)}>Decline<//>
          <button type="button" class="link" onClick=${() => setAsJson(true)}>Answer with JSON</button></div>`
      : html`<${Form} label=${`Answer ${name}`} verb="Answer" act=${act}><${SchemaFields} schema=${asJson ? null : schema} field="answer" label="Answer" /><//>`}
    ${answer !== undefined && html`<${ConfirmAnswer} question=${question} answer=${answer} onClose=${() => setAnswer(undefined)} onDone=${onDone} />`}`;
}

function ConfirmAnswer({ question, answer, onClose, onDone }) {
  const { run_id: runId, key, name, request_id: requestId } = question;
  const verb = answer === true ? "Approve" : answer === false ? "Decline" : "Answer";
  return html`<${Confirm} title=${`${verb} “${name}” of ${runName(question)}`} verb=${verb} danger=${answer === false} onClose=${onClose} onDone=${onDone}
      act=${() => source.send("POST", runPath(runId, "approvals", name), { answer, request_id: requestId })}>
    <p>The run <strong class="break">${key || runId}</strong> continues with this answer. It cannot be changed later.</p>
    <${Json} value=${answer} label="Answer" />
  <//>`;
}

export function titleOf(name) {
  if (name.startsWith("in_doubt:")) return `Did the step “${name.slice("in_doubt:".length)}” take effect?`;
  return name.startsWith("tool:") ? `May the tool “${name.slice("tool:".length)}” be called?` : name;
}

/** An item of `questions` of a run: one line until it is opened, so that it leaves the room to what is below. */
export function Question({ question, onDone }) {
  return html`<details class="card ask">
    <summary data-row><h2>${titleOf(question.name)}</h2> <${State} state="waiting">asked <${Ago} time=${question.asked_at} /><//></summary>
    <div class="asked"><${Asked} question=${question} onDone=${onDone} /></div>
  </details>`;
}

/** What a question asks, and the form that answers it. */
export function Asked({ question, onDone }) {
  const can = useCan();
  const { name, approved_before: before, details, problem } = question;
  return html`
    ${name.startsWith("in_doubt:") && html`<p>Its process was interrupted, so its outcome is unknown. Check it, then answer “done” with its result,
      “retry” to run it again, or “failed” to let the run fail.</p>`}
    ${problem && html`<p role="alert">The last answer does not fit: <span class="break">${problem}</span></p>`}
    ${before && html`<p>The run <a href=${href(["runs", before])}>${shortId(before)}</a> got this approval before.</p>`}
    <${Json} value=${details} label="Details" />
    ${can("approve") ? html`<${AnswerForm} question=${question} onDone=${onDone} />` : html`<p class="quiet">You may read this question here, but not answer it.</p>`}`;
}

// -- The actions on one run. Each asks for a confirmation that names the run.
const RESUMABLE = ["failed", "cancelled", "timed_out", "dead"];

/** The buttons for what can be done with the run now. */
export function RunActions({ run, live, onDone }) {
  const can = useCan();
  const acts = can("act");
  const [open, setOpen] = useState(null);
  const actions = [
    ["Resume", Resume, acts && RESUMABLE.includes(run.state), "primary"],
    ["Cancel", Cancel, acts && live && !run.cancel_requested],
    ["Signal", Signal, (acts || can("send")) && live],
    ["Fork", Fork, acts],
    ["Compare", CompareWith, !source.exported],
  ].filter(([, , isPossible]) => isPossible);
  const [, Chosen] = actions.find(([name]) => name === open) || [];
  return html`${actions.map(([name, , , kind]) => html`<${Button} key=${name} kind=${kind} onClick=${() => setOpen(name)}>${name}<//>`)}
    ${Chosen && html`<${Chosen} run=${run} onClose=${() => setOpen(null)} onDone=${onDone} />`}`;
}

/** The run, as every confirmation names it. */
const named = (run) => html`<strong class="break">${run.key || run.run_id}</strong>`;

const post = (run, what, body, headers) => source.send("POST", runPath(run.run_id, ...what), body, headers);

function Cancel({ run, onClose, onDone }) {
  return html`<${Confirm} title=${`Cancel ${runName(run)}`} verb="Cancel the run" danger=${true} onClose=${onClose} act=${() => post(run, ["cancel"], { wait: 5 })}
      onDone=${({ state }) => onDone(state === "cancelled" ? "The run is cancelled." : "Cancellation is requested.")}>
    <p>The run ${named(run)} stops at its next step, and so do its child runs. You can resume it later.</p><//>`;
}

function Resume({ run, onClose, onDone }) {
  return html`<${Confirm} title=${`Resume ${runName(run)}`} verb="Resume the run" onClose=${onClose} act=${() => post(run, ["resume"])}
      onDone=${() => onDone("The run was resumed.")}>
    <p>A worker resumes the ${stateName(run.state)} run ${named(run)}. Completed steps keep their results.</p><//>`;
}

function Signal({ run, onClose, onDone }) {
  const waits = run.waiting_for.find((each) => each.kind === "signal");
  // It makes it safe to send the signal again after a failure.
  const key = useMemo(() => `page-${Date.now().toString(36)}-${Math.random().toString(36).slice(2)}`, []);
  const act = async ({ elements: { signal, payload } }) =>
    post(run, ["signals", signal.value], parsedJson(payload.value, "The payload") ?? null, { "Idempotency-Key": key });
  return html`<${Confirm} title=${`Send a signal to ${runName(run)}`} verb="Send the signal" onClose=${onClose} act=${act} onDone=${() => onDone("The signal is stored.")}>
    <p>The run ${named(run)} gets the signal when it waits for one with this name.</p>
    <${Field} label="Name"><input name="signal" required defaultValue=${waits ? waits.name : ""} /><//>
    <${Field} label="Payload" hint="JSON. Empty means null."><textarea name="payload" spellcheck="false"></textarea><//><//>`;
}

function Fork({ run, onClose }) {
  const steps = usePages(runPath(run.run_id, "timeline"), { limit: 1000 }, { cursor: "after" });
  const input = useMemo(() => JSON.stringify(run.input, null, 2), []);
  const act = async ({ elements }) =>
    post(run, ["fork"], {
      after_step: elements.step.value || null, new_run_id: elements.key.value || null,
      input: elements.input.value === input ? undefined : parsedJson(elements.input.value, "The input"),
    });
  // A failed tool call or child run has a saved result: its error.
  const saved = steps.items.filter(({ state, kind }) => ["done", "copied"].includes(state) || (state === "failed" && ["tool", "child"].includes(kind)));
  return html`<${Confirm} title=${`Fork ${runName(run)}`} verb="Fork the run" onClose=${onClose} act=${act} onDone=${(made) => go(["runs", made.run_id])}>
    <p>A new run starts with the saved results of ${named(run)} and continues from there. This run does not change.</p>
    ${steps.error && html`<${Failed} error=${steps.error} retry=${steps.reload} />`}
    <${Field} label="Keep the results up to" hint="Steps after this one run again.">
      <select name="step"><option value="">the last saved result</option>
        ${saved.map((each) => html`<option key=${each.step_id} value=${each.step_id}>${each.sequence + 1}. ${each.label} ${each.kind !== "step" || /^:?0$/.test(each.key) ? "" : each.key}</option>`)}
      </select><//>
    ${!steps.complete && !steps.loading && !steps.error && html`<button type="button" class="link" onClick=${steps.more}>Load more steps</button>`}
    <${Field} label="Input" hint="JSON. Saved results stay as they are."><textarea name="input" spellcheck="false" defaultValue=${input}></textarea><//>
    <${Field} label=${html`Run key of the new run <span class="quiet">optional</span>`}><input name="key" maxlength="512" /><//><//>`;
}

function CompareWith({ run, onClose }) {
  const forked = run.metadata && run.metadata.forked_from;
  return html`<${Confirm} title=${`Compare ${runName(run)} with…`} verb="Compare" onClose=${onClose}
      act=${async ({ elements }) => go(["compare", run.run_id, elements.other.value.trim()])}>
    <${Field} label="Other run" hint="Its run id or run key."><input name="other" required defaultValue=${(forked && forked.run_id) || ""} /><//><//>`;
}
