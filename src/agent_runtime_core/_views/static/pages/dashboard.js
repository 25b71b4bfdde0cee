// What the runs of the last hour, day or week did: numbers over time, latencies, cost and errors.
import { html, useEffect, useState } from "../ui.js";
import { count, duration, localTime, plural, usd } from "../format.js";
import { Empty, Facts, Loaded, PageHead, Select, State, Table } from "../parts.js";
import { useQuery } from "../queries.js";
import { go, href } from "../router.js";

const WINDOWS = { hour: "Last hour", day: "Last day", week: "Last week" };
const LATENCIES = { queue: "Queue: from creation to start", run: "Run: from start to end", step: "Step", model: "Model call" };
const SHOWN = 10; // agents, tenants, models and errors
const [WIDTH, HEIGHT] = [100, 120]; // percent and pixels

export function DashboardPage({ route }) {
  const chosen = Object.hasOwn(WINDOWS, route.params.get("window")) ? route.params.get("window") : "day";
  const [every, setEvery] = useState(1000);
  const query = useQuery("dashboard", { window: chosen }, { every });
  const complete = Boolean(query.data && query.data.complete);
  useEffect(() => setEvery(complete ? 5000 : 1000), [complete]);
  return html`<${PageHead} title="Dashboard">
      <${Select} label="Time" options=${Object.entries(WINDOWS)} value=${chosen} onChange=${(each) => go(["dashboard"], { window: each }, { replace: true })} /><//>
    <${Loaded} query=${query}>${(data) => html`<${Shown} data=${data} />`}<//>`;
}

function Shown({ data }) {
  if (!data.runs) return html`<${Empty} title="No run was created in the last week." />`;
  const latencies = Object.entries(LATENCIES).filter(([kind]) => data.latency[kind].count);
  const seconds = (value) => (value === null ? "–" : duration(value));
  return html`
    ${!data.complete && html`<p class="note" role="status">${plural(data.runs, "run")} counted so far, back to ${localTime(data.counted_since)}.</p>`}
    <${Facts} pairs=${[["Started", count(data.started)], ["Ended", count(data.ended)], ["Failed", count(data.failed)],
      ["Share that failed", data.ended > 0 && `${((100 * data.failed) / data.ended).toFixed(1)} %`]]} />
    <${Chart} series=${data.series} />
    <section class="section"><h2>Latency</h2>
      <${Table} label="Latency" head=${["Latency", ["p50", "num"], ["p95", "num"], ["p99", "num"], ["Count", "num"]]} rows=${latencies.map(([kind, text]) => {
        const { p50, p95, p99, count: number } = data.latency[kind];
        return [text, seconds(p50), seconds(p95), seconds(p99), count(number)];
      })} />
      <p class="quiet">Steps and model calls are those of ${plural(data.journals, "run")}.</p></section>
    <div class="sides section">${["agent", "tenant", "model"].map((by) => html`<${Costs} key=${by} by=${by} items=${data.cost[by]} />`)}</div>
    ${data.errors.length > 0 && html`<section class="section"><h2>Errors</h2>
      <${Table} label="Errors" head=${["Type", ["Runs", "num"]]} rows=${data.errors.slice(0, SHOWN).map(({ type, runs }) => [
        html`<span class="break">${type}</span>`, count(runs)])} />
      <p><a href=${href(["runs"], { state: ["failed", "dead", "timed_out"] })}>Show the failed runs</a></p></section>`}`;
}

/** Bars of the runs that ended, with the failed ones in them, and a line of the started ones. */
function Chart({ series }) {
  const most = Math.max(1, ...series.map((each) => Math.max(each.started, each.ended)));
  const size = WIDTH / series.length;
  const height = (value) => (value / most) * (HEIGHT - 8);
  const bar = (each, index, value, state) => value > 0 && html`<rect key=${`${state}${index}`} class=${`tl-bar is-${state}`} x=${`${(index + 0.15) * size}%`} width=${`${size * 0.7}%`}
    y=${HEIGHT - height(value)} height=${height(value)}><title>${`${localTime(each.at)}: ${each.ended} ended, ${each.failed} failed, ${each.started} started`}</title></rect>`;
  const line = (each, index) => html`<line key=${`started${index}`} class="chart-started" x1=${`${index * size}%`} x2=${`${(index + 1) * size}%`} y1=${HEIGHT - height(each.started)} y2=${HEIGHT - height(each.started)} />`;
  const sum = (name) => series.reduce((total, each) => total + each[name], 0);
  return html`<figure class="section"><figcaption class="page-note"><${State} state="done">ended<//><${State} state="failed">failed<//><${State} state="running">started<//><span class="quiet">at most ${count(most)}</span></figcaption>
    <svg class="chart" width="100%" height=${HEIGHT} role="img" aria-label=${`${sum("started")} runs started, ${sum("ended")} ended and ${sum("failed")} failed, in ${series.length} parts of the time`}>
      ${series.map((each, index) => html`${bar(each, index, each.ended, "done")}${bar(each, index, each.failed, "failed")}${line(each, index)}`)}
    </svg>
    <p class="page-note small chart-ends"><time>${localTime(series[0].at)}</time><time>${localTime(series[series.length - 1].at)}</time></p></figure>`;
}

function Costs({ by, items }) {
  const filter = (name) => (by !== "model" && name && name !== "other" ? html`<a data-row href=${href(["runs"], { [by]: name })}>${name}</a>` : name || "no tenant");
  return html`<section><h2>Cost by ${by}</h2>
    ${items.length
      ? html`<${Table} label=${`Cost by ${by}`} head=${[by[0].toUpperCase() + by.slice(1), ["Cost", "num"], ["Tokens", "num"]]}
          rows=${items.slice(0, SHOWN).map((each) => [filter(each.name), usd(each.cost_usd), count(each.tokens)])} />`
      : html`<p class="quiet">None in this time.</p>`}</section>`;
}
