// The live log of a run (newest at the bottom, filtered by type, with a jump to a sequence number), and its journal.
import { html, useContext, useEffect, useMemo, useRef, useState } from "../ui.js";
import { count, duration, plural, shortId } from "../format.js";
import { About, followEvents, usePages } from "../queries.js";
import { Empty, Failed, Json, LoadedList, Loading, LogRow, Select, Split, Windowed, useNarrow } from "../parts.js";
import { go } from "../router.js";
import { runPath, source } from "../source.js";

const SHOWN_FIRST = ["message", "delta", "step_name", "tool_name", "name", "reason", "error", "content", "state"];
const STATES = { loading: "Loading…", live: "Live", reconnecting: "Reconnecting…", ended: "The run has finished", failed: "Stopped" };

/** Follow the events of a run. Returns { events, state, error }; `events` grows in place. */
function useEvents(runId, live) {
  const about = useContext(About);
  const { current: events } = useRef([]);
  const [status, setStatus] = useState({ state: "loading", error: null, count: 0 });
  useEffect(
    () =>
      followEvents(about, runId, events.length ? events[events.length - 1].sequence : -1, {
        onEvents: (fresh) => {
          events.push(...fresh);
          setStatus((before) => ({ ...before, count: events.length }));
        },
        onState: (state, error) => setStatus((before) => ({ ...before, state, error })),
      }),
    [live], // a run that was resumed is followed again
  );
  return { events, ...status };
}

/** The beginning of what an event says. Only visible rows ask for it, because a payload may be large. */
function summaryOf({ payload, from_agent }) {
  const names = [...new Set([...SHOWN_FIRST.filter((name) => name in payload), ...Object.keys(payload)])];
  const field = (name) => (SHOWN_FIRST.includes(name) ? "" : `${name}=`) + brief(payload[name]);
  const [ids, others] = [true, false].map((isId) => names.filter((name) => payload[name] !== null && name.endsWith("_id") === isId));
  return [...(from_agent ? ["emitted by the agent"] : []), ...others.slice(0, 5).map(field), ...ids.slice(0, 5).map(field)].join(", ");
}

function brief(value) {
  if (Array.isArray(value)) return `[${value.length}]`;
  if (typeof value === "string") return value && shortId(value).slice(0, 160);
  return value && typeof value === "object" ? `{${Object.keys(value).slice(0, 4).join(", ")}}` : String(value).slice(0, 160);
}

export function EventsTab({ runId, route, live }) {
  const { events, state, error } = useEvents(runId, live);
  const type = route.params.get("type") || "";
  const at = route.params.get("at") || "";
  const [chosen, setChosen] = useState(null);
  const narrow = useNarrow();
  const types = useMemo(() => [...new Set([...events.map((each) => each.type), ...(type ? [type] : [])])].sort(), [events.length, type]);
  const rows = useMemo(() => (type ? events.filter((each) => each.type === type) : [...events]), [events.length, type]);
  const found = at ? rows.findIndex((each) => each.sequence >= Number(at)) : -1;
  const change = (changes) => go(["runs", runId, "events"], { type, at, ...changes }, { replace: true });
  const row = (each) => html`<${LogRow} key=${each.sequence} number=${each.sequence} time=${each.time} type=${each.type} text=${summaryOf(each)}
    chosen=${each === chosen} marked=${String(each.sequence) === at} onOpen=${() => setChosen(each)} />`;
  return html`
    ${error && html`<${Failed} error=${error} />`}
    <div class="tools">
      <${Select} label="Event type" value=${type} onChange=${(each) => change({ type: each })} options=${[["", "All types"], ...types.map((each) => [each, each])]} />
      <label class="check">Go to<input type="number" min="0" aria-label="Sequence number" value=${at} onChange=${(event) => change({ at: event.target.value })} /></label>
      <span class="quiet num" role="status" aria-live="off">${plural(events.length, "event")}${type && `, ${count(rows.length)} shown`}</span>
      <span class=${state === "live" ? "is-live" : "quiet"} role="status">${!source.exported && STATES[state]}</span>
    </div>
    ${rows.length
      ? html`<${Split} title=${chosen && `${chosen.type} ${chosen.sequence}`} onClose=${() => setChosen(null)}
            detail=${chosen && html`<p class="quiet">${chosen.time}${chosen.from_agent && ", emitted by the agent"}</p><${Json} key=${chosen.sequence} value=${chosen.payload} label="Payload" lines=${60} />`}>
          <${Windowed} items=${rows} height=${narrow ? 48 : 32} row=${row} label="Events" follow=${live && !at} target=${found < 0 ? null : found} /><//>`
      : state === "loading"
        ? html`<${Loading} what="Loading the events" />`
        : !error && html`<${Empty} title=${events.length ? "No event matches this filter." : "The run has no events yet."} />`}`;
}

// -- The records of a run's journal, as they are stored.
export function JournalTab({ runId, live }) {
  const list = usePages(runPath(runId, "journal"), { limit: 500 }, { cursor: "after", every: live ? 2000 : 0 });
  const [chosen, setChosen] = useState(null);
  const narrow = useNarrow();
  const row = (each) => html`<${LogRow} key=${each.seq} number=${each.seq} time=${each.time} type=${each.kind} text=${textOf(each)}
    chosen=${Boolean(chosen) && chosen.seq === each.seq} onOpen=${() => setChosen(each)} />`;
  return html`<p class="quiet tools">${count(list.items.length)}${list.complete ? "" : "+"} records</p>
    <${LoadedList} list=${list} empty=${html`<${Empty} title="The journal has no records yet." />`}>
      <${Split} title=${chosen && `Record ${chosen.seq}`} onClose=${() => setChosen(null)}
          detail=${chosen && html`<${Json} key=${chosen.seq} value=${chosen} label="As it is stored" lines=${80} />`}>
        <${Windowed} items=${list.items} height=${narrow ? 48 : 32} row=${row} label="Records" onEnd=${list.more} /><//><//>`;
}

function textOf({ name, key, ms, attempt, info }) {
  const more = [key, ms && duration(ms / 1000), attempt > 1 && `attempt ${attempt}`, info && info.error && String(info.error)];
  return [name, ...more].filter(Boolean).join(", ");
}
