// Two texts line by line: what is only in one of them, with what is equal folded.
import { html, useMemo } from "./ui.js";
import { json, plural } from "./format.js";

const MOST_CELLS = 1e6; // of the table that compares the lines: more lines count as replaced
const CONTEXT = 2; // equal lines that stay next to a difference

/** The lines of both: [{ mark: " ", "-" or "+", text }]. */
export function diffLines(before, after) {
  let start = 0;
  while (start < before.length && start < after.length && before[start] === after[start]) start += 1;
  let end = 0;
  while (end < Math.min(before.length, after.length) - start && before[before.length - 1 - end] === after[after.length - 1 - end]) end += 1;
  const [a, b] = [before.slice(start, before.length - end), after.slice(start, after.length - end)];
  const lines = (mark, texts) => texts.map((text) => ({ mark, text }));
  const middle = a.length * b.length > MOST_CELLS ? [...lines("-", a), ...lines("+", b)] : changed(a, b);
  return [...lines(" ", before.slice(0, start)), ...middle, ...lines(" ", before.slice(before.length - end))];
}

/** The longest common subsequence, from the lengths of those of all endings. */
function changed(a, b) {
  const longest = Array.from({ length: a.length + 1 }, () => new Uint32Array(b.length + 1));
  for (let i = a.length - 1; i >= 0; i -= 1) {
    for (let j = b.length - 1; j >= 0; j -= 1) {
      longest[i][j] = a[i] === b[j] ? longest[i + 1][j + 1] + 1 : Math.max(longest[i + 1][j], longest[i][j + 1]);
    }
  }
  const found = [];
  for (let [i, j] = [0, 0]; i < a.length || j < b.length; ) {
    if (i < a.length && j < b.length && a[i] === b[j]) {
      found.push({ mark: " ", text: a[i] });
      [i, j] = [i + 1, j + 1];
    } else if (j === b.length || (i < a.length && longest[i + 1][j] >= longest[i][j + 1])) found.push({ mark: "-", text: a[i++] });
    else found.push({ mark: "+", text: b[j++] });
  }
  return found;
}

/** Replace equal lines that are far from each difference: [{ mark, text }, or { equal: lines }, …]. */
export function folded(lines) {
  const near = new Set();
  lines.forEach(({ mark }, at) => {
    for (let each = at - CONTEXT; mark !== " " && each <= at + CONTEXT; each += 1) near.add(each);
  });
  const found = [];
  lines.forEach((line, at) => {
    const last = found[found.length - 1];
    if (near.has(at)) found.push(line);
    else if (last && last.equal) last.equal.push(line);
    else found.push({ equal: [line] });
  });
  return found.flatMap((each) => (each.equal && each.equal.length <= CONTEXT ? each.equal : [each]));
}

const linesOf = (value) => (typeof value === "string" ? value : json(value) || "").split("\n");
const textOf = (lines) => lines.map(({ mark, text }) => html`<span class=${{ "-": "only-first", "+": "only-second" }[mark]}>${mark} ${text}${"\n"}</span>`);

/** Two values as lines: "-" is in the first run only, "+" in the second one. */
export function Diff({ label, before, after }) {
  const parts = useMemo(() => folded(diffLines(linesOf(before), linesOf(after))), [before, after]);
  return html`<section class="diff" aria-label=${label}><p class="label">${label}: <span class="only-first">− first run</span> <span class="only-second">+ second run</span></p>
    ${parts.map((part, index) => (part.equal
      ? html`<details key=${index}><summary class="quiet small">${plural(part.equal.length, "equal line")}</summary><pre tabindex="0">${textOf(part.equal)}</pre></details>`
      : (index === 0 || parts[index - 1].equal) && html`<pre key=${index} tabindex="0">${textOf(until(parts, index))}</pre>`))}
  </section>`;
}

function until(parts, index) {
  const end = parts.findIndex((part, at) => at > index && part.equal);
  return parts.slice(index, end < 0 ? parts.length : end);
}
