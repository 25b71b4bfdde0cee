// The calls of a run and of its child runs as a tree, with tokens and cost summed upward.
const FAILED = ["failed", "dead", "timed out"];

/** The id of what a row is inside of: a tool call is inside the model call that requested it. */
function outerOf(row, models) {
  const requested = row.kind === "tool" && models.get(row.key.slice(0, row.key.lastIndexOf(":")));
  return requested || row.parent;
}

/** A sum that is null as long as nothing was added to it. */
function added(sum, value) {
  return value === null || value === undefined ? sum : (sum ?? 0) + value;
}

/**
 * The nodes of a run: [{ id, runId, row, children, tokens, cost, failed }, …]. `rowsOf(runId)` has the rows of a run, or
 * nothing if they are not loaded. `failed` is whether the row or one below it has failed.
 */
export function treeOf(runId, rowsOf, seen = new Set()) {
  const rows = seen.has(runId) ? [] : rowsOf(runId) || [];
  const above = new Set([...seen, runId]); // stored data may be damaged: no run is its own child
  const models = new Map(rows.filter((row) => row.kind === "model").map((row) => [row.key, row.step_id]));
  const nodes = new Map(rows.map((row) => [row.step_id, { id: row.step_id, runId, row, children: [] }]));
  const roots = [];
  for (const node of nodes.values()) {
    const outer = nodes.get(outerOf(node.row, models));
    (outer && outer !== node ? outer.children : roots).push(node);
    if (node.row.child_run_id) node.children.push(...treeOf(node.row.child_run_id, rowsOf, above));
  }
  roots.forEach(sumUp);
  return roots;
}

function sumUp(node) {
  node.children.forEach(sumUp);
  const below = totalOf(node.children);
  const { kind, tokens, cost_usd: cost, state } = node.row;
  // The result of a child run has all that it has used. While it is live, its calls have it.
  const isWhole = kind === "child" && tokens !== null;
  node.tokens = isWhole ? tokens : added(below.tokens, tokens);
  node.cost = isWhole ? cost : added(below.cost, cost);
  node.failed = FAILED.includes(state) || node.children.some((each) => each.failed);
}

/** What nodes have used together. */
export function totalOf(nodes) {
  return {
    tokens: nodes.reduce((sum, each) => added(sum, each.tokens), null),
    cost: nodes.reduce((sum, each) => added(sum, each.cost), null),
  };
}

/** The call that failed last, as deep as possible; null if none has failed. */
export function failedCall(nodes) {
  const last = nodes.filter((each) => each.failed).pop();
  return last ? failedCall(last.children) || last : null;
}

/** The nodes that are shown, each with its depth: what is folded hides what is below it. */
export function shownNodes(nodes, folded, depth = 0) {
  return nodes.flatMap((node) => [{ ...node, depth }, ...(folded.has(node.id) ? [] : shownNodes(node.children, folded, depth + 1))]);
}
