// The plan of a run: a graph of its steps with their states, or a table if there are too many of them.
import { html, useEffect, useMemo, useState } from "../ui.js";
import { between, count, stateClass } from "../format.js";
import { useQuery } from "../queries.js";
import { runPath } from "../source.js";
import { Empty, Facts, Json, Loaded, Split, State, Table } from "../parts.js";

const MOST_DRAWN = 100;
const [WIDTH, HEIGHT, GAP_X, GAP_Y, MARGIN] = [184, 52, 56, 20, 12]; // pixels

export function PlanTab({ runId, live }) {
  const query = useQuery(runPath(runId, "plan"), {}, { every: live ? 2000 : 0 });
  const [chosen, setChosen] = useState(null);
  // The last states are read after the run has finished.
  useEffect(() => query.reload(), [live]);
  return html`<${Loaded} query=${query}>${(plan) => {
    if (!plan.nodes || !plan.nodes.length) {
      return html`<${Empty} title="The run has no plan.">Runs of a prompt and runs with a list of steps have one.<//>`;
    }
    const node = plan.nodes.find((each) => each.id === chosen);
    const View = plan.nodes.length > MOST_DRAWN ? List : Graph;
    return html`${plan.goal && html`<p class="break tools"><span class="quiet">Goal</span> ${plan.goal}</p>`}
      <${Split} title=${node && node.name} onClose=${() => setChosen(null)} detail=${node && html`<${Detail} node=${node} plan=${plan} />`}>
        <${View} plan=${plan} chosen=${chosen} onOpen=${setChosen} /><//>`;
  }}<//>`;
}

/** Place the nodes in layers by the longest path, and inside a layer near the nodes that they need. */
function layout({ nodes, edges }) {
  const places = new Map(nodes.map((node) => [node.id, { node, needs: [], layer: 0 }]));
  const known = edges.map(({ from, to }) => [places.get(from), places.get(to)]).filter(([from, to]) => from && to);
  for (const [from, to] of known) to.needs.push(from);
  // A plan has no cycle, but stored data may be damaged: no plan needs more rounds than it has nodes.
  for (let [round, changed] = [1, true]; changed && round < nodes.length; round += 1) {
    changed = false;
    for (const place of places.values()) {
      const layer = Math.max(0, ...place.needs.map((each) => each.layer + 1));
      changed = changed || layer > place.layer;
      place.layer = layer;
    }
  }
  const layers = [];
  for (const place of places.values()) (layers[place.layer] = layers[place.layer] || []).push(place);
  const most = Math.max(...layers.map((layer) => (layer ? layer.length : 0)));
  layers.forEach((layer, number) => {
    const order = new Map(layer.map((each, index) => [each, each.needs.length ? each.needs.reduce((sum, need) => sum + need.y, 0) / each.needs.length : index]));
    layer.sort((a, b) => order.get(a) - order.get(b));
    const top = MARGIN + ((most - layer.length) * (HEIGHT + GAP_Y)) / 2;
    layer.forEach((each, index) => Object.assign(each, { x: MARGIN + number * (WIDTH + GAP_X), y: top + index * (HEIGHT + GAP_Y) }));
  });
  return {
    places: [...places.values()], edges: known,
    width: layers.length * (WIDTH + GAP_X) - GAP_X + 2 * MARGIN, height: most * (HEIGHT + GAP_Y) - GAP_Y + 2 * MARGIN,
  };
}

/** The path of an edge, from the right side of a node to the left side of another one. */
function curve(from, to) {
  const [x1, y1, x2, y2] = [from.x + WIDTH, from.y + HEIGHT / 2, to.x - 6, to.y + HEIGHT / 2];
  const bend = Math.max((x2 - x1) / 2, 24);
  return `M${x1},${y1} C${x1 + bend},${y1} ${x2 - bend},${y2} ${x2},${y2}`;
}

function Graph({ plan, chosen, onOpen }) {
  const { places, edges, width, height } = useMemo(() => layout(plan), [plan]);
  return html`<div class="card plan" tabindex="0" role="group" aria-label="Plan">
    <svg width=${width} height=${height}>
      <defs><marker id="arrow" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="8" markerHeight="8" markerUnits="userSpaceOnUse" orient="auto"><path d="M0,0 L8,4 L0,8 Z" /></marker></defs>
      ${edges.map(([from, to]) => html`<path key=${`${from.node.id} ${to.node.id}`} class="plan-edge" d=${curve(from, to)} marker-end="url(#arrow)" />`)}
      ${places.map(({ node, x, y }) => html`<foreignObject key=${node.id} x=${x} y=${y} width=${WIDTH} height=${HEIGHT}>
        <button type="button" data-row class=${`plan-node ${stateClass(node.state)}`} aria-pressed=${node.id === chosen} title=${node.tool ? `${node.name}: ${node.tool}` : node.name} onClick=${() => onOpen(node.id)}>
          <span class="cut strong">${node.name}</span><span class="plan-note"><${State} state=${node.state} />${node.tool && html`<code class="cut">${node.tool}</code>`}</span></button></foreignObject>`)}
    </svg>
  </div>`;
}

function List({ plan, chosen, onOpen }) {
  return html`<p class="quiet">${count(plan.nodes.length)} steps are too many for a drawing.</p>
    <${Table} label="Plan" head=${["Step", "Tool", "State", ["Duration", "num"], ["Attempts", "num"]]} rows=${plan.nodes.map((node) => [
      html`<button type="button" data-row class="link" aria-pressed=${node.id === chosen} onClick=${() => onOpen(node.id)}>${node.name}</button>`,
      node.tool, html`<${State} state=${node.state} />`, node.ended_at && between(node.started_at, node.ended_at), node.attempts,
    ])} />`;
}

function Detail({ node, plan }) {
  const needs = plan.nodes.filter(({ id }) => plan.edges.some(({ from, to }) => to === node.id && from === id));
  return html`<${State} state=${node.state} />
    ${node.description && html`<p class="text">${node.description}</p>`}
    ${node.error && html`<p class="error-text">${typeof node.error === "string" ? node.error : `${node.error.type}: ${node.error.message}`}</p>`}
    <${Facts} pairs=${[
      ["Duration", node.started_at && between(node.started_at, node.ended_at)], ["Attempts", node.attempts || null],
      ["Tool", node.tool], ["Kind", node.kind], ["Needs", needs.map((each) => each.name).join(", ")],
      ["Step id", html`<span class="mono">${node.step_id}</span>`],
    ]} />
    <${Json} key=${node.id} value=${node.input} label="Input" />`;
}
