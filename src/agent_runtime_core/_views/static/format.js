// Values as text. Every function accepts null and returns "–" for it.
import { now } from "./source.js";

const NONE = "–";
const number = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

export function count(value) {
  return value === null || value === undefined ? NONE : number.format(value);
}

export function usd(value) {
  if (value === null || value === undefined) return NONE;
  if (value === 0) return "$0";
  return value < 0.01 ? `$${Number(value.toPrecision(2))}` : `$${value.toFixed(value < 1 ? 3 : 2)}`;
}

/** A duration of so many seconds: 320 ms, 4.2 s, 3 min 20 s, 2 h 5 min, 3 d 4 h. A coarse one has the first unit only. */
export function duration(seconds, coarse = false) {
  if (seconds === null || seconds === undefined) return NONE;
  if (seconds < 0.001) return "< 1 ms";
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 60) return `${seconds < 10 && !coarse ? seconds.toFixed(1) : Math.round(seconds)} s`;
  const [big, small, size, base] =
    seconds < 3600 ? ["min", "s", 60, 1] : seconds < 86400 ? ["h", "min", 3600, 60] : ["d", "h", 86400, 3600];
  const whole = Math.floor(seconds / size);
  const rest = Math.floor((seconds % size) / base);
  return rest && !coarse ? `${whole} ${big} ${rest} ${small}` : `${whole} ${big}`;
}

export function secondsOf(time) {
  return time ? Date.parse(time) / 1000 : null;
}

/** The time between two RFC 3339 times, or until now. */
export function between(start, end) {
  return start ? duration(Math.max((end ? secondsOf(end) : now() / 1000) - secondsOf(start), 0)) : NONE;
}

/** How long ago a time is, in one coarse unit: just now, 3 min ago, 2 h ago. A later time is "in 3 min". */
export function ago(time) {
  if (!time) return NONE;
  const seconds = Date.now() / 1000 - secondsOf(time);
  if (seconds > -1 && seconds < 60) return "just now";
  const text = duration(Math.floor(Math.abs(seconds)), true);
  return seconds < 0 ? `in ${text}` : `${text} ago`;
}

const two = (value) => String(value).padStart(2, "0");

/** A time in the time zone of the browser: 2026-11-26 21:04:07. */
export function localTime(time) {
  if (!time) return NONE;
  const t = new Date(time);
  const day = `${t.getFullYear()}-${two(t.getMonth() + 1)}-${two(t.getDate())}`;
  return `${day} ${two(t.getHours())}:${two(t.getMinutes())}:${two(t.getSeconds())}`;
}

export function clockTime(time) {
  return time ? `${localTime(time).slice(11)}${new Date(time).toISOString().slice(19, 23)}` : NONE;
}

/** The name of a state as people write it: "timed_out" is "timed out". */
export function stateName(state) {
  return String(state).replaceAll("_", " ");
}

/** The class of a state in the style sheets: "is-timed-out". */
export function stateClass(state) {
  return `is-${stateName(state).replaceAll(" ", "-")}`;
}

/** A number with its noun: "1 run", "2 runs". */
export function plural(value, noun) {
  return `${count(value)} ${value === 1 ? noun : `${noun}s`}`;
}

export function json(value) {
  return value === undefined ? "" : JSON.stringify(value, null, 2);
}

/** Beginning and end of an id. Ids of runs begin with their time, so runs of the same minute differ only at the end. */
export function shortId(id) {
  return id && /^[0-9a-f-]{36}$/.test(id) ? `${id.slice(0, 8)}…${id.slice(-6)}` : id || NONE;
}

/** The name of a run: its key, or else its short id. */
export function runName(run) {
  return run.key || shortId(run.run_id);
}

/** The agent of a run, and its tenant if it has one. */
export function agentName(run) {
  return run.tenant ? `${run.agent} · ${run.tenant}` : run.agent;
}
