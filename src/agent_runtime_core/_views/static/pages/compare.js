// Two runs side by side: what changed, and from which step on.
import { html, useMemo, useState } from "../ui.js";
import { Diff } from "../diff.js";
import { count, duration, shortId, usd } from "../format.js";
import { href } from "../router.js";
import { useQuery } from "../queries.js";
import { runPath } from "../source.js";
import { Button, Empty, Facts, Json, Loaded, PageHead, State } from "../parts.js";

const SHOWN = 200; // steps
const WORDS = { same: "same", changed: "changed", only_in_run: "only in the first run", only_in_other: "only in the second run" };

export function ComparePage({ runId, otherId }) {
  if (!otherId) return html`<${PageHead} title="Compare" /><${Empty} title="Choose a run first.">See the <a href=${href(["runs"])}>runs</a>.<//>`;
  return html`<${Comparison} key=${`${runId}/${otherId}`} runId=${runId} otherId=${otherId} />`;
}

function Comparison({ runId, otherId }) {
  const query = useQuery(runPath(runId, "compare", otherId));
  return html`
    <${PageHead} title="Compare" />
    <${Loaded} query=${query}>${(found) => html`
      <p class="strong tools" role="status">${summaryOf(found)}</p>
      <div class="sides">
        <${Side} label="First run" id=${runId} outcome=${found.runs.run} /><${Side} label="Second run" id=${otherId} outcome=${found.runs.other} />
      </div>
      ${found.input_changed && html`<${Diff} label="Input" before=${found.runs.run.input} after=${found.runs.other.input} />`}
      <${Steps} found=${found} />`}<//>`;
}

/** "Same until step 3 of 12; 4 changed, 1 only in the first run." */
function summaryOf({ steps, counts, first_difference: first }) {
  if (!steps.length) return "Neither run has a step.";
  if (first === null) return steps.length === 1 ? "The only step is the same." : `All ${count(steps.length)} steps are the same.`;
  const parts = ["changed", "only_in_run", "only_in_other"].filter((each) => counts[each]).map((each) => `${count(counts[each])} ${WORDS[each]}`);
  const start = first === 0 ? "Different from the first step on" : `Same until step ${count(first)} of ${count(steps.length)}`;
  return `${start}; ${parts.join(", ")}.`;
}

function Side({ label, id, outcome }) {
  const usage = outcome.usage || {};
  return html`<section class="card" aria-label=${label}>
    <p class="quiet small">${label}</p>
    <h2><a href=${href(["runs", id])} title=${id}>${outcome.key || shortId(id)}</a></h2>
    <p class="page-note"><${State} state=${outcome.state} /><span class="break">${outcome.agent}</span></p>
    ${outcome.error && html`<p class="error-text">${outcome.error.type}: ${outcome.error.message}</p>`}
    <${Facts} pairs=${[["Tokens", count(usage.total_tokens)], ["Cost", usd(usage.cost_usd)]]} />
  </section>`;
}

/** Equal steps in sequence are one entry: [{ index, steps, isEqual }, …]. */
function entriesOf(steps) {
  const entries = [];
  steps.forEach((step, index) => {
    const last = entries[entries.length - 1];
    const isEqual = step.outcome === "same";
    if (isEqual && last && last.isEqual) last.steps.push(step);
    else entries.push({ index, steps: [step], isEqual });
  });
  return entries;
}

function Steps({ found: { steps, first_difference: first } }) {
  const [shown, setShown] = useState(SHOWN);
  const entries = useMemo(() => entriesOf(steps), [steps]);
  return steps.length > 0 && html`<section class="section">
    <h2>Steps</h2>
    ${entries.slice(0, shown).map(({ index, steps: each, isEqual }) => (isEqual
      ? html`<${EqualSteps} key=${index} index=${index} steps=${each} />`
      : html`<${StepPair} key=${index} number=${index + 1} step=${each[0]} isFirst=${index === first} />`))}
    ${entries.length > shown && html`<${Button} onClick=${() => setShown(shown + SHOWN)}>Show more steps<//>`}
  </section>`;
}

function EqualSteps({ index, steps }) {
  const [open, setOpen] = useState(false);
  const names = [...new Set(steps.map((step) => step.name))].slice(0, 4).join(", ");
  return html`<details class="pair" onToggle=${(event) => event.target === event.currentTarget && setOpen(event.target.open)}>
    <summary data-row class="quiet">${steps.length > 1 ? `Steps ${index + 1} to ${index + steps.length} are equal` : `Step ${index + 1} is equal`}: <span class="break">${names}</span></summary>
    ${open && steps.slice(0, SHOWN).map((step, at) => html`<${StepPair} key=${at} number=${index + at + 1} step=${step} isFirst=${false} />`)}
    ${open && steps.length > SHOWN && html`<p class="quiet">The first ${SHOWN} of them are shown.</p>`}
  </details>`;
}

function StepPair({ number, step, isFirst }) {
  const [open, setOpen] = useState(isFirst);
  const { run, other } = step;
  const compares = Boolean(run && other) && !run.error && !other.error && step.changed.includes("result");
  const took = (side) => (side && side.duration_ms !== null ? duration(side.duration_ms / 1000) : "–");
  return html`<details class="pair" open=${isFirst} onToggle=${(event) => event.target === event.currentTarget && setOpen(event.target.open)}>
    <summary data-row><span class="quiet">${number}</span>${" "}
      <span class="strong break">${step.name}</span> <span class="quiet break">${/^:?0$/.test(step.key) ? "" : step.key}</span>${" "}
      <span class=${`outcome-${step.outcome}`}>${step.outcome === "changed" ? `${step.changed.join(", ")} changed` : WORDS[step.outcome]}</span>${" "}
      <span class="quiet num">${took(run)} → ${took(other)}</span></summary>
    ${open && html`<div class="sides"><${Value} label="First run" side=${run} both=${compares} /><${Value} label="Second run" side=${other} both=${compares} /></div>
      ${compares && html`<${Diff} label="Result" before=${run.result} after=${other.result} />`}`}
  </details>`;
}

function Value({ label, side, both }) {
  if (!side) return html`<p class="quiet">${label}: the step did not run.</p>`;
  return html`<div>
    <p class="page-note">${label}<${State} state=${side.state} />${side.attempts > 1 && ` ${side.attempts} attempts`} ${side.cost_usd !== null && usd(side.cost_usd)}</p>
    ${side.error
      ? html`<p class="error-text">${typeof side.error === "string" ? side.error : `${side.error.type}: ${side.error.message}`}</p>`
      : !both && html`<${Json} value=${side.result} label="Result" lines=${16} />`}
  </div>`;
}
