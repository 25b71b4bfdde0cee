// The open questions of all runs: a table with filters, the details of one, and one answer for several of the same kind.
import { html, useRef, useState } from "../ui.js";
import { Asked, SchemaFields, isYesOrNo, titleOf, valueOf } from "../actions.js";
import { agentName, count, plural, runName } from "../format.js";
import { Ago, Button, Dialog, Empty, Form, Json, Loaded, Notice, PageHead, RunLink, Select, Split, Table } from "../parts.js";
import { useCan, useQuery } from "../queries.js";
import { go, href } from "../router.js";
import { ApiError, runPath, source } from "../source.js";

const MOST = 200;
const NAMED = 20; // runs of a confirmation
const FILTERS = ["q", "agent", "question", "tenant", "order"];

/** Questions of one kind take the same answers: they have the same agent, name and schema. */
const kindOf = (question) => JSON.stringify([question.agent, question.name, question.schema]);

function matching(items, { q, agent, question, tenant, order }) {
  const text = q.toLowerCase();
  const found = items.filter((each) => (!agent || each.agent === agent) && (!question || each.name === question) && (!tenant || each.tenant === tenant)
    && (!text || `${each.key} ${each.run_id} ${each.name} ${JSON.stringify(each.details)}`.toLowerCase().includes(text)));
  return order === "newest" ? found.reverse() : found;
}

export function ApprovalsPage({ route }) {
  const query = useQuery("approvals", { limit: MOST }, { every: 4000 });
  const [notice, setNotice] = useState(null);
  const shown = useRef(null);
  // While a confirmation is open, its question stays: the server says whether the answer counts.
  if (!shown.current || !document.querySelector("dialog[open]")) shown.current = query.data;
  const filters = Object.fromEntries(FILTERS.map((name) => [name, route.params.get(name) || ""]));
  const change = (changes) => go(["approvals"], { ...filters, open: route.params.get("open"), ...changes }, { replace: true });
  const done = (text) => {
    setNotice(text);
    query.reload();
  };
  return html`
    <${PageHead} title="Approvals" note=${query.data && plural(query.data.items.length, "open question")} />
    <${Loaded} query=${{ ...query, data: shown.current }}>${({ items, next }) => (items.length
      ? html`<${Filters} items=${items} filters=${filters} change=${change} />
          <${Questions} items=${matching(items, filters)} filters=${filters} open=${route.params.get("open")} change=${change} onDone=${done} />
          ${next && html`<p class="quiet">The oldest ${MOST} questions are shown. The next ones appear when some of these are answered.</p>`}`
      : html`<${Empty} title="No run waits for an answer.">Questions of runs appear here as soon as they are asked.<//>`)}<//>
    ${notice && html`<${Notice} text=${notice} onClose=${() => setNotice(null)} />`}`;
}

function Filters({ items, filters, change }) {
  const choice = (name, field, label) => {
    const values = [...new Set([...items.map((each) => each[field]), filters[name]])].filter(Boolean);
    return (values.length > 1 || filters[name]) && html`<${Select} label=${label} value=${filters[name]} onChange=${(each) => change({ [name]: each })}
      options=${[["", `All ${label.toLowerCase()}s`], ...values.map((each) => [each, each])]} />`;
  };
  return html`<div class="filters" role="search">
    <input type="search" aria-label="Run or details contain" placeholder="Run or details" value=${filters.q} onInput=${(event) => change({ q: event.target.value })} />
    ${choice("question", "name", "Question")}${choice("agent", "agent", "Agent")}${choice("tenant", "tenant", "Tenant")}
    <${Select} label="Order" value=${filters.order} onChange=${(each) => change({ order: each })} options=${[["", "Oldest first"], ["newest", "Newest first"]]} />
  </div>`;
}

function Questions({ items, filters, open, change, onDone }) {
  const may = useCan()("approve");
  const [selected, setSelected] = useState([]); // request ids, all of one kind
  const [dialog, setDialog] = useState(null);
  const chosen = items.filter((each) => selected.includes(each.request_id));
  const kind = chosen.length ? kindOf(chosen[0]) : null;
  const toggle = ({ request_id: id }) => setSelected((before) => (before.includes(id) ? before.filter((each) => each !== id) : [...before, id]));
  const question = items.find((each) => each.request_id === open);
  const select = (each) => html`<input type="checkbox" aria-label=${`Select ${each.name} of ${runName(each)}`} checked=${selected.includes(each.request_id)}
    disabled=${kind !== null && kindOf(each) !== kind} onChange=${() => toggle(each)} />`;
  const rows = items.map((each) => [
    html`<span class="picked">${may && select(each)}<button type="button" data-row class="link break" aria-pressed=${each.request_id === open}
      onClick=${() => change({ open: each.request_id })}>${titleOf(each.name)}</button></span>`,
    html`<${RunLink} run=${each} /><div class="quiet small break">${agentName(each)}</div>`, html`<${Ago} time=${each.asked_at} />`,
  ]);
  const finished = (text) => {
    setSelected([]);
    onDone(text);
  };
  if (!items.length) return html`<${Empty} title="No question matches these filters."><a href=${href(["approvals"])}>Show all questions</a><//>`;
  return html`
    ${may && html`<${Bar} items=${items} chosen=${chosen} setSelected=${setSelected} setDialog=${setDialog} />`}
    <${Split} title=${question && titleOf(question.name)} onClose=${() => change({ open: null })}
        detail=${question && html`<p class="page-note"><${RunLink} run=${question} /> <span class="break">${agentName(question)}</span> asked <${Ago} time=${question.asked_at} /></p>
          <${Asked} key=${question.request_id} question=${question} onDone=${() => finished(`Answered. The run ${runName(question)} continues.`)} />`}>
      <${Table} label="Open questions" head=${["Question", "Run", ["Asked", "num"]]} rows=${rows} /><//>
    ${dialog && html`<${AnswerAll} ...${dialog} onDone=${finished} onClose=${() => setDialog(null)} />`}`;
}

/** What can be selected together, or what can be done with the selected questions. */
function Bar({ items, chosen, setSelected, setDialog }) {
  if (!chosen.length) {
    const kinds = Map.groupBy(items, kindOf);
    const several = [...kinds.values()].filter((each) => each.length > 1).slice(0, 6);
    return several.length > 0 && html`<div class="tools">${several.map((each) => html`<${Button} key=${kindOf(each[0])} kind="small"
      onClick=${() => setSelected(each.map(({ request_id: id }) => id))}>Select ${count(each.length)}: ${each[0].name} of ${each[0].agent}<//>`)}</div>`;
  }
  const number = plural(chosen.length, "question");
  const button = (verb, answer, style) => html`<${Button} kind=${`small ${style}`} onClick=${() => setDialog({ verb, questions: chosen, answer })}>${verb} ${number}<//>`;
  return html`<div class="tools" role="group" aria-label="Selected questions">
    ${isYesOrNo(chosen[0].schema) ? html`${button("Approve", true, "primary")}${button("Decline", false, "danger")}` : button("Answer", undefined, "primary")}
    <button type="button" class="link" onClick=${() => setSelected([])}>Clear the selection</button></div>`;
}

/** A confirmation that names the runs. Without an `answer` it has the form of their schema. Each answer is a request. */
function AnswerAll({ verb, questions, answer, onDone, onClose }) {
  const [failed, setFailed] = useState(null);
  const number = plural(questions.length, "question");
  const act = async (form) => {
    const value = answer ?? valueOf(questions[0].schema, new FormData(form), "answer", "The answer");
    const wrong = [];
    for (const each of questions) {
      try {
        await source.send("POST", runPath(each.run_id, "approvals", each.name), { answer: value, request_id: each.request_id });
      } catch (error) {
        if (!(error instanceof ApiError)) throw error;
        wrong.push([each, error.message]);
      }
    }
    const text = `${plural(questions.length - wrong.length, "question")} answered.`;
    if (wrong.length) setFailed([wrong, text]);
    else {
      onClose();
      onDone(text);
    }
  };
  const close = () => {
    onClose();
    if (failed) onDone(failed[1]);
  };
  return html`<${Dialog} title=${`${verb} ${number}`} onClose=${close}>
    ${failed
      ? html`<p role="status">${failed[1]}</p><div class="failed" role="alert"><p class="failed-title">${plural(failed[0].length, "question")} not answered</p>
          <ul>${failed[0].slice(0, NAMED).map(([each, why]) => html`<li key=${each.request_id}><strong>${runName(each)}</strong> ${why}</li>`)}</ul></div>
          <div class="form-actions"><${Button} onClick=${close}>Close<//></div>`
      : html`<p>These runs continue with the same answer to <strong class="break">${questions[0].name}</strong>. It cannot be changed later.</p>
          <ul class="names" tabindex="0" aria-label="Runs">${questions.slice(0, NAMED).map((each) => html`<li key=${each.request_id}><span class="cut" title=${each.run_id}>${runName(each)}</span><${Ago} time=${each.asked_at} /></li>`)}
            ${questions.length > NAMED && html`<li>and ${plural(questions.length - NAMED, "more run")}</li>`}</ul>
          <${Form} verb=${`${verb} ${number}`} danger=${answer === false} act=${act} label=${`Answer ${number}`} onClose=${onClose} keepOpen=${true}>
            ${answer === undefined ? html`<${SchemaFields} schema=${questions[0].schema} field="answer" label="Answer" />` : html`<${Json} value=${answer} label="Answer" />`}<//>`}
  <//>`;
}
