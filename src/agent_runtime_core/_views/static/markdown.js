// Markdown as elements of the page. All text is in text nodes: HTML stays text, and nothing is a link or loads an image.
import { html, useMemo } from "./ui.js";

const MOST = 60000; // characters; a longer text is shown as it was written
const DEEPEST = 6; // quotes, lists and emphasis inside each other; what is deeper stays text
const FURTHEST = 2000; // characters to the end of emphasis, code or the address of a link
const FENCE = /^ {0,3}(`{3,}|~{3,})/;
const HEADING = /^ {0,3}(#{1,6}) +(.*)$/;
const RULE = /^ {0,3}([-*_])( *\1){2,} *$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)]) +(.*)$/;
const CELLS = /^\|? *:?-+:? *(\| *:?-+:? *)*\|?$/;
const MARKS = ["**", "__", "~~", "*", "_", "`"];
const NAMES = { "**": "strong", "__": "strong", "~~": "del", "*": "em", _: "em", "`": "code" };

/** A text in Markdown. Line breaks stay. */
export function Markdown({ text }) {
  const parts = useMemo(() => (text.length > MOST ? null : blocks(text.split("\n"), 0)), [text]);
  return parts ? html`<div class="md">${parts}</div>` : html`<div class="text">${text}</div>`;
}

/** Whether a line ends the paragraph before it. */
function isBlock(line) {
  return !line.trim() || [FENCE, HEADING, QUOTE, ITEM].some((each) => each.test(line)) || isRule(line);
}

const isRule = (line) => line.length < 200 && RULE.test(line);
const isCells = (line) => line !== undefined && line.length < 1000 && line.includes("|") && CELLS.test(line.trim());

function blocks(lines, depth) {
  if (depth > DEEPEST) return html`<p>${lines.join("\n")}</p>`;
  const found = [];
  for (let at = 0; at < lines.length; ) {
    const [block, next] = lines[at].trim() ? blockAt(lines, at, depth) : [null, at + 1];
    found.push(block);
    at = next;
  }
  return found;
}

/** The block that begins at a line, and the line after it. */
function blockAt(lines, at, depth) {
  const line = lines[at];
  const fence = FENCE.exec(line);
  if (fence) {
    const end = lines.findIndex((each, index) => index > at && each.trim().startsWith(fence[1]));
    const last = end < 0 ? lines.length : end;
    return [html`<pre tabindex="0"><code>${lines.slice(at + 1, last).join("\n")}</code></pre>`, last + 1];
  }
  const heading = HEADING.exec(line);
  if (heading) return [html`<p class="md-head">${inline(heading[2].replace(/ +#+ *$/, ""), 0)}</p>`, at + 1];
  if (isRule(line)) return [html`<hr />`, at + 1];
  if (QUOTE.test(line)) {
    const end = endOf(lines, at, (each) => QUOTE.test(each));
    return [html`<blockquote>${blocks(lines.slice(at, end).map((each) => each.replace(QUOTE, "")), depth + 1)}</blockquote>`, end];
  }
  if (ITEM.test(line)) return listAt(lines, at, depth);
  if (line.includes("|") && isCells(lines[at + 1])) return tableAt(lines, at);
  const end = endOf(lines, at + 1, (each) => !isBlock(each));
  return [html`<p>${inline(lines.slice(at, end).join("\n"), 0)}</p>`, end];
}

/** The first line from `at` on that does not fit. */
function endOf(lines, at, fits) {
  let end = at;
  while (end < lines.length && fits(lines[end])) end += 1;
  return end;
}

function listAt(lines, first, depth) {
  const [, indent, sign] = ITEM.exec(lines[first]);
  const isOrdered = /\d/.test(sign);
  const begins = (line) => {
    const item = ITEM.exec(line);
    return item && item[1].length <= indent.length && /\d/.test(item[2]) === isOrdered ? item : null;
  };
  const isInside = (line, index) => /^ {2,}\S/.test(line.slice(indent.length)) || (!line.trim() && index + 1 < lines.length && /^ {2,}\S/.test(lines[index + 1].slice(indent.length)));
  const items = [];
  let at = first;
  for (let item = begins(lines[at]); item; item = at < lines.length && begins(lines[at])) {
    const text = [item[3]];
    for (at += 1; at < lines.length && !begins(lines[at]) && isInside(lines[at], at); at += 1) text.push(lines[at].slice(indent.length + 2));
    // The first line is text, also if it looks like a block: an item of "- - -" would else be lists in lists.
    items.push(html`<li value=${isOrdered ? parseInt(item[2], 10) : null}>${inline(text[0], 0)}${text.length > 1 && blocks(text.slice(1), depth + 1)}</li>`);
  }
  return [isOrdered ? html`<ol>${items}</ol>` : html`<ul>${items}</ul>`, at];
}

function tableAt(lines, at) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").slice(0, 50).map((each) => inline(each.trim(), 0));
  const end = endOf(lines, at + 2, (each) => each.includes("|"));
  return [html`<div class="scroll-x" tabindex="0" role="region" aria-label="Table"><table>
    <thead><tr>${cells(lines[at]).map((each) => html`<th scope="col">${each}</th>`)}</tr></thead>
    <tbody>${lines.slice(at + 2, end).map((line) => html`<tr>${cells(line).map((each) => html`<td>${each}</td>`)}</tr>`)}</tbody></table></div>`, end];
}

/** The parts of a text: strings and elements. */
function inline(text, depth) {
  if (depth > DEEPEST) return text;
  const found = [];
  const missing = new Set(); // marks that do not occur any more: they are searched for once
  let [plain, at] = [0, 0];
  while (at < text.length) {
    const part = "\\`*_~![".includes(text[at]) && (escapeAt(text, at) || linkAt(text, at, depth) || markAt(text, at, depth, missing));
    if (part) {
      found.push(text.slice(plain, at), part.shown);
      plain = at = part.end;
    } else at += 1;
  }
  return [...found, text.slice(plain)];
}

function escapeAt(text, at) {
  return text[at] === "\\" && /[!-/:-@[-`{-~]/.test(text[at + 1] || "") ? { shown: text[at + 1], end: at + 2 } : null;
}

/** [text](address) or ![text](address): the text, and the address in parentheses. */
function linkAt(text, at, depth) {
  const isImage = text[at] === "!";
  const start = isImage ? at + 1 : at;
  if (text[start] !== "[") return null;
  const near = text.slice(start, start + FURTHEST);
  const middle = near.indexOf("](");
  const end = middle < 0 ? -1 : near.indexOf(")", middle);
  const label = near.slice(1, middle);
  if (end < 0 || /[[\]\n]/.test(label)) return null;
  return { shown: html`${inline(label, depth + 1)} <span class="quiet">(${isImage && "image: "}${near.slice(middle + 2, end)})</span>`, end: start + end + 1 };
}

function markAt(text, at, depth, missing) {
  const mark = MARKS.find((each) => text.startsWith(each, at));
  if (!mark || missing.has(mark)) return null;
  const start = at + mark.length;
  // Inside a word, such as in snake_case, "_" is a letter.
  const isWord = mark.includes("_") && /\w/.test(text[at - 1] || "");
  const end = text.indexOf(mark, start + 1);
  if (end < 0) missing.add(mark);
  if (end < 0 || end - start > FURTHEST || isWord || /\s/.test(text[start]) || (mark !== "`" && /\s/.test(text[end - 1]))) return null;
  if (mark.includes("_") && /\w/.test(text[end + mark.length] || "")) return null;
  const inside = text.slice(start, end);
  if (mark !== "`" && inside.includes("\n\n")) return null;
  const Name = NAMES[mark];
  return { shown: html`<${Name}>${mark === "`" ? inside : inline(inside, depth + 1)}<//>`, end: end + mark.length };
}
