// Read from the source inside a component, once or again and again, and follow the events of a run.
import { createContext, useCallback, useContext, useEffect, useRef, useState } from "./ui.js";
import { parsed, runPath, source } from "./source.js";

/** What `about` says of the server and the caller. */
export const About = createContext(null);

/** What `queue` says, read again every few seconds by the frame for all pages: { data, error, loading, reload }. */
export const Queue = createContext({ data: null, error: null, loading: true, reload: () => {} });

/** Whether the caller may do something: can("act"). A read-only store allows nothing but reading. */
export function useCan() {
  const about = useContext(About);
  return (scope) => !source.exported && !about.read_only && about.scopes.includes(scope);
}

const SHARE = 30; // a server works for each part of a page at most a thirtieth of the time, however much there is to read
const LONGEST = 30000;

/** How many milliseconds to wait before something is read again that was asked for at `began`: longer if it took long. */
export function pause(every, began) {
  return Math.max(every, Math.min((performance.now() - began) * SHARE, LONGEST));
}

/**
 * Read `path`, and read it again every `every` milliseconds while the page is visible.
 *
 * Returns { data, error, loading, reload }. While it is read again `data` stays. After a failure `error` is set, and
 * `data` is what was read before: a page shows the error, and never an empty list in its place.
 */
export function useQuery(path, params, { every = 0 } = {}) {
  const key = path === null ? null : `${path} ${JSON.stringify(params || {})}`;
  const [state, setState] = useState({ key: null, data: null, error: null, loading: true });
  const [turn, setTurn] = useState(0);
  const reload = useCallback(() => setTurn((before) => before + 1), []);
  const latest = useRef(null);
  latest.current = { params, every };
  useEffect(() => {
    if (path === null) return undefined;
    const abort = new AbortController();
    let timer = 0;
    const read = async () => {
      const began = performance.now();
      try {
        const data = await source.get(path, latest.current.params, abort.signal);
        setState({ key, data, error: null, loading: false });
      } catch (error) {
        if (abort.signal.aborted) return;
        setState((before) => ({ key, data: before.key === key ? before.data : null, error, loading: false }));
      }
      const next = latest.current.every;
      if (next && !source.exported && !abort.signal.aborted) timer = setTimeout(again, pause(next, began));
    };
    const again = () => {
      if (document.hidden) timer = setTimeout(again, 500);
      else read();
    };
    read();
    return () => {
      abort.abort();
      clearTimeout(timer);
    };
  }, [key, turn, every > 0]); // another pace is no reason to read at once
  const mine = state.key === key;
  return {
    data: mine ? state.data : null, error: mine ? state.error : null, loading: !mine || state.loading, reload,
  };
}

/**
 * Read a list in pages. Returns { items, error, loading, complete, more, reload }; `more()` reads the next page.
 *
 * `cursor` is the parameter that takes `next`: "cursor" for lists, "after" for parts of a run. With `every`, the last page
 * is read again after so many milliseconds: what is stored in between is read too. `itemsOf(page)` returns the items of a page.
 */
export function usePages(path, params, { cursor = "cursor", every = 0, itemsOf = (page) => page.items } = {}) {
  const key = `${path} ${JSON.stringify(params)}`;
  const [state, setState] = useState({ key: null });
  const [turn, setTurn] = useState(0);
  const busy = useRef(null);
  const wasRead = useRef(false); // whether it was read again and again
  const current = state.key === key ? state : { items: [], next: undefined, error: null, loading: true };
  const readFrom = async (from, before) => {
    const abort = new AbortController();
    const began = performance.now();
    busy.current = abort;
    try {
      const page = await source.get(path, { ...params, [cursor]: from }, abort.signal);
      setState({ key, from, before, rest: pause(every, began), items: [...before, ...itemsOf(page)], next: page.next, error: null, loading: false });
    } catch (error) {
      if (abort.signal.aborted) return;
      setState({ ...current, key, error, loading: false });
    } finally {
      if (busy.current === abort) busy.current = null;
    }
  };
  useEffect(() => {
    readFrom(undefined, []);
    return () => busy.current && busy.current.abort();
  }, [key, turn]);
  useEffect(() => {
    if (!every || source.exported || current.next !== null) return undefined;
    const timer = setTimeout(() => document.hidden || busy.current || readFrom(current.from, current.before), current.rest);
    return () => clearTimeout(timer);
  }, [every, state]);
  useEffect(() => {
    // It is read once more after the end of the run, for its last items.
    if (wasRead.current && !every) setTurn((before) => before + 1);
    wasRead.current = every > 0;
  }, [every > 0]);
  return {
    items: current.items, error: current.error, loading: current.loading,
    complete: current.next === null,
    more: () => {
      if (!busy.current && current.next && !current.error) readFrom(current.next, current.items);
    },
    reload: () => setTurn((before) => before + 1),
  };
}

// -- Follow the events of a run: as a stream, with requests that wait, or from an exported file.
const ENDS = ["run.succeeded", "run.failed", "run.timed_out", "run.cancelled"];
const WAIT_SECONDS = 20;

/** Whether a state is one of a run that has not finished. */
export function isLive(state) {
  return ["pending", "running", "waiting"].includes(state);
}

/**
 * Read the events of a run after the sequence number `after` (-1: from the first), and follow it until it has finished.
 * With `types`, read only the events whose type fits one of these patterns.
 *
 * `onEvents(events)` gets what arrived, in order and without repetitions. `onState(state,
 * error)` gets "loading", "live", "reconnecting", "ended" or "failed". Returns a function that stops.
 */
export function followEvents(about, runId, after, { types, onEvents, onState }) {
  const abort = new AbortController();
  const { signal } = abort;
  let [waiting, timer, lastType, isQuiet] = [[], 0, "", true];

  const flush = () => {
    timer = 0;
    if (!waiting.length || signal.aborted) return;
    const events = waiting;
    waiting = [];
    onEvents(events);
  };
  const receive = (events) => {
    const fresh = events.filter((event) => event.sequence > after);
    if (!fresh.length) return;
    isQuiet = false;
    const last = fresh[fresh.length - 1];
    [after, lastType] = [last.sequence, last.from_agent ? "" : last.type];
    waiting.push(...fresh);
    if (!timer) timer = setTimeout(flush, 30); // many events are one change of the page
  };
  const readPages = async (wait) => {
    isQuiet = true;
    for (let next = after; next !== null && !signal.aborted; ) {
      const page = await source.get(runPath(runId, "events"), { after: next < 0 ? null : next, wait, types }, signal);
      receive(page.items);
      next = page.next;
    }
    flush();
  };
  // The run says it for sure: it may have been resumed since its last event, and its last events may be deleted.
  const hasEnded = async () =>
    (isQuiet || ENDS.includes(lastType)) && !isLive((await source.get(runPath(runId), {}, signal)).state);
  /** Receive a stream until it ends. The browser makes a lost connection again, with the last sequence number. */
  const stream = () =>
    new Promise((done) => {
      isQuiet = true;
      const events = new EventSource(source.eventsUrl(runId, { after: after < 0 ? null : after, types }));
      const close = () => {
        events.close();
        done();
      };
      signal.addEventListener("abort", close);
      events.onopen = () => onState("live", null);
      events.onmessage = ({ data }) => {
        const event = parsed(data);
        if (event.sequence !== undefined) receive([event]);
        else if (event.type === "end") close();
      };
      events.onerror = () => {
        onState("reconnecting", null);
        // A status other than 200: the run has finished in between, or the server is not ready. Reading pages shows which.
        if (events.readyState === EventSource.CLOSED) setTimeout(close, 1000);
      };
    });
  const follow = async () => {
    onState("loading", null);
    for (let [failures, wait] = [0, null]; !signal.aborted; ) {
      try {
        // Pages first, also before a stream: a message for each of 20,000 events takes longer.
        await readPages(wait);
        if (about.live === "none" || (await hasEnded())) break;
        failures = 0;
        onState("live", null);
        if (about.live === "stream") await stream();
        else wait = WAIT_SECONDS;
      } catch (error) {
        if (signal.aborted) return;
        flush();
        wait = null;
        if (!isPassing(error.status)) return onState("failed", error);
        onState("reconnecting", error);
        await new Promise((done) => setTimeout(done, Math.min(1000 * 2 ** failures++, 15000)));
      }
    }
    if (!signal.aborted) onState("ended", null);
  };
  follow();
  return () => abort.abort();
}

/** Whether a failure may pass: no answer, too many requests, a server that starts or stops. */
function isPassing(status) {
  return status === 0 || status === 429 || status >= 500;
}
