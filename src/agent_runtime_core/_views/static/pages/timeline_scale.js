// Time to position. Long idle gaps are folded: positions run from 0 to 1, and each folded gap takes a narrow part of it.
import { duration } from "../format.js";

const FOLD_FRACTION = 0.4; // a gap is folded if it is longer than this part of the work
const FOLD_MINIMUM = 1000; // milliseconds
const BREAK_WIDTH = 0.08;
const BREAKS_WIDTH = 0.4; // all breaks together
const IDLE_KINDS = ["sleep", "wait", "approval"];
const STEPS = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 15e3, 3e4, 6e4, 12e4, 3e5, 6e5, 9e5, 18e5, 36e5,
  72e5, 108e5, 216e5, 432e5, 864e5];

/** Milliseconds of an RFC 3339 time, with its microseconds, which Date.parse drops. */
export function millis(time) {
  if (!time) return null;
  const micros = /\.\d{3}(\d{3})/.exec(time);
  return Date.parse(time) + (micros ? Number(micros[1]) / 1000 : 0);
}

/** The intervals in which a row works. Waiting, backing off and an unknown outcome are no work. */
export function activityOf(row, now, isParent = false) {
  if (row.from === null) return [];
  const to = row.to ?? now;
  if (isParent || IDLE_KINDS.includes(row.kind)) return [[row.from, row.from], [to, to]];
  if (row.state === "in doubt") return [[row.from, row.from]];
  if (!row.attempts.length) return [[row.from, to]];
  return row.attempts.filter((each) => each.from !== null).map((each) => [each.from, each.to ?? (each.state === "running" ? now : each.from)]);
}

/** Sort intervals and join those that touch. */
export function union(intervals) {
  const joined = [];
  for (const [from, to] of intervals.slice().sort((a, b) => a[0] - b[0])) {
    const last = joined[joined.length - 1];
    if (last && from <= last[1]) last[1] = Math.max(last[1], to);
    else joined.push([from, Math.max(from, to)]);
  }
  return joined;
}

const total = (intervals) => intervals.reduce((sum, [from, to]) => sum + to - from, 0);

/** The scale of [from, to]: segments [{ from, to, start, end, folded }], whose start and end are positions from 0 to 1. */
export function timeScale(intervals, from, to) {
  const inside = (time) => Math.min(Math.max(time, from), to);
  const busy = union([[from, from], ...intervals.map(([a, b]) => [inside(a), inside(b)]), [to, to]]);
  const gaps = busy.slice(1).map(([start], index) => [busy[index][1], start]);
  const limit = Math.max(total(busy) * FOLD_FRACTION, FOLD_MINIMUM);
  const folds = gaps.filter(([a, b]) => b - a >= limit);
  const shown = to - from - total(folds);
  // Nothing but waiting: the gaps take all of the width.
  const width = folds.length && (shown > 0 ? Math.min(BREAK_WIDTH, BREAKS_WIDTH / folds.length) : 1 / folds.length);
  const unit = shown > 0 ? (1 - width * folds.length) / shown : 0;
  const segments = [];
  let [time, position] = [from, 0];
  const add = (until, size, folded) => {
    segments.push({ from: time, to: until, start: position, end: position + size, folded });
    [time, position] = [until, position + size];
  };
  for (const [a, b] of folds) {
    add(a, (a - time) * unit, false);
    add(b, width, true);
  }
  add(to, (to - time) * unit, false);
  return { from, to, unit, segments };
}

function segmentAt({ segments }, value, edge) {
  return segments.find((each) => value <= each[edge]) || segments[segments.length - 1];
}

/** The position of a time, from 0 to 1; outside of the scale it continues at the same rate. */
export function positionOf(scale, time) {
  const { from, to, start, end } = segmentAt(scale, time, "to");
  if (time > to || time < from || to === from) return start + (time - from) * scale.unit;
  return start + ((time - from) / (to - from)) * (end - start);
}

/** The time at a position: the inverse of `positionOf`. */
export function timeAt(scale, position) {
  const { from, to, start, end } = segmentAt(scale, position, "end");
  return end === start ? from : from + ((position - start) / (end - start)) * (to - from);
}

/** The part of the scale that is shown, [0, 1] without a zoom. A zoom is a pair of times, so that it stays when rows arrive. */
export function viewOf(scale, zoom) {
  if (!zoom) return [0, 1];
  const [a, b] = [Math.max(positionOf(scale, zoom[0]), 0), Math.min(positionOf(scale, zoom[1]), 1)];
  return b - a > 1e-7 ? [a, b] : [0, 1];
}

/** The folded gaps in the view and about `wanted` round times that are not near one: [{ position, label, gap }]. */
export function ticks(scale, [a, b], wanted) {
  const found = scale.segments.filter((each) => each.folded && each.end > a && each.start < b)
    .map((each) => ({ position: (each.start + each.end) / 2, label: duration((each.to - each.from) / 1000, true), gap: each }));
  if (!scale.unit) return found;
  const step = STEPS.find((each) => each * scale.unit * wanted >= b - a) || 864e5 * Math.ceil((b - a) / scale.unit / wanted / 864e5);
  const near = ((b - a) / wanted) * 0.7;
  const add = (time) => {
    const position = positionOf(scale, time);
    if (position < a || position > b || found.some((each) => Math.abs(each.position - position) < near)) return;
    found.push({ position, label: elapsed(time - scale.from, step), gap: null });
  };
  for (const segment of scale.segments) {
    if (segment.folded || segment.end < a || segment.start > b) continue;
    const first = Math.max(segment.from, timeAt(scale, Math.max(a, segment.start))) - scale.from;
    const last = Math.min(segment.to, timeAt(scale, Math.min(b, segment.end))) - scale.from;
    for (let at = Math.ceil(first / step - 1e-9) * step; at <= last; at += step) add(scale.from + at);
  }
  return found;
}

/** The time since the start, exact to the step of the axis: 200 ms, 1.5 s, 2:05, 3:00:10, 1 d 03:00:10. */
function elapsed(ms, step) {
  if (Math.round(ms) === 0) return "0";
  if (ms < 1000 && step < 1000) return `${Math.round(ms)} ms`;
  if (ms < 60e3) return `${Number((ms / 1000).toFixed(3))} s`;
  const days = Math.floor(ms / 864e5);
  const time = new Date(ms).toISOString().slice(11, step < 1000 ? 23 : 19);
  return days ? `${days} d ${time}` : time.replace(/^(00:)?0?/, "");
}
