// The frame of the page: navigation, sign-in, keyboard, and the page that the URL names.
import { html, render, useContext, useEffect, useErrorBoundary, useLayoutEffect, useMemo, useRef, useState } from "./ui.js";
import { count, localTime } from "./format.js";
import { Dialog, Empty, Facts, Failed, Field, Form, Loading } from "./parts.js";
import { About, Queue, useQuery } from "./queries.js";
import { go, href, useRoute } from "./router.js";
import { ApiError, source } from "./source.js";
import { ApprovalsPage } from "./pages/approvals.js";
import { ComparePage } from "./pages/compare.js";
import { DashboardPage } from "./pages/dashboard.js";
import { PoolsPage } from "./pages/pools.js";
import { RunPage } from "./pages/run.js";
import { DeadPage, RunsPage } from "./pages/runs.js";
import { SchedulesPage } from "./pages/schedules.js";
import { AboutPage, AgentsPage, QueuePage, UsagePage } from "./pages/store.js";
import { WorkersPage } from "./pages/workers.js";

// -- The keys that work on every page.
const GO = { r: "runs", o: "dashboard", a: "approvals", q: "queue", w: "workers", s: "schedules", p: "pools", d: "dead", u: "usage", e: "agents" };
const KEYS = [
  ["/", "Search"],
  ["j k", "Next and previous row"],
  ["Enter", "Open the row"],
  ["x", "Select the row"],
  ...Object.entries(GO).map(([key, page]) => [`g ${key}`, `Go to ${page}`]),
  ["?", "Show the keys"],
];

/** Handle the keys. `j`, `k` and Enter move between the elements with the attribute data-row. */
function useKeys(showHelp) {
  useEffect(() => {
    let before = "";
    const pressed = (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
      if (event.target.closest("input:not([type=checkbox], [type=radio]), textarea, select, [contenteditable]")) {
        if (event.key === "Escape") event.target.blur();
        return;
      }
      const chord = before === "g" ? GO[event.key] : null;
      before = event.key;
      if (chord) go([chord]);
      else if (event.key === "?") showHelp();
      else if (event.key === "/") document.querySelector("input[type=search]")?.focus();
      else if (event.key === "j" || event.key === "k") moveRow(event.key === "j" ? 1 : -1);
      else if (event.key === "x") document.activeElement.closest(".table-row")?.querySelector("input[type=checkbox]")?.click();
      else return;
      event.preventDefault();
    };
    addEventListener("keydown", pressed);
    return () => removeEventListener("keydown", pressed);
  }, []);
}

function moveRow(step) {
  const rows = [...document.querySelectorAll("[data-row]")];
  // Next to the details of a row, the keys start at that row.
  const at = document.activeElement.closest(".detail") ? rows.find((row) => row.matches("[aria-current=true], [aria-pressed=true]")) : document.activeElement;
  const now = rows.findIndex((row) => row.contains(at));
  const visible = rows.findIndex((row) => row.getBoundingClientRect().top >= 0);
  const next = rows[now < 0 ? Math.max(visible, 0) : Math.min(Math.max(now + step, 0), rows.length - 1)];
  if (!next) return;
  next.focus({ preventScroll: true });
  next.scrollIntoView({ block: "nearest" });
}

function Help({ onClose }) {
  return html`<${Dialog} title="Keys" onClose=${onClose}><${Facts} pairs=${KEYS.map(([keys, text]) => [text, html`<kbd>${keys}</kbd>`])} /><//>`;
}

// -- What a reader of an exported file has to know: it is a copy, from when, and what it does not have.
function ExportedNote() {
  const about = source.about;
  return html`<aside class="note exported-note" aria-label="About this file">
    <p>A copy of the run as of <time datetime=${about.exported_at}>${localTime(about.exported_at)}</time>, written by version ${about.version}.
      ${about.redacted && " Its contents are left out: inputs, outputs, payloads, messages and error messages. Keys are replaced by a hash."}</p>
    ${about.left_out.length > 0 && html`<p>The run is too large for a file. These are missing:</p>
      <ul>${about.left_out.map((each) => html`<li>${each}</li>`)}</ul>`}
  </aside>`;
}

// -- A browser signs in with the one-time code of the printed URL, or with a token.
/** Exchange the code in the fragment, if there is one, for a cookie. The code leaves the URL before anything else. */
export async function exchangeCode() {
  const found = /^#code=(.+)$/.exec(location.hash);
  if (!found) return;
  history.replaceState(null, "", location.pathname + location.search);
  dispatchEvent(new HashChangeEvent("hashchange")); // the code is no page
  try {
    await source.send("POST", "session", { code: found[1] });
  } catch (error) {
    // A code that was used before: the cookie of that time may still be valid, and otherwise the token is asked for.
    if (error.status !== 401) throw error;
  }
}

function SignIn({ ended, onDone }) {
  useEffect(() => {
    document.title = "Sign in – Agent runtime";
  }, []);
  const act = (form) => source.send("POST", "session", { token: form.elements.token.value.trim() });
  return html`<main class="alone"><div class="card">
    <h1>Sign in</h1>
    ${ended && html`<p class="note" role="status">Your session has ended. After you sign in, the same page opens again.</p>`}
    <p>Enter a token from the token file of the server. <code>agent-runtime serve</code> prints its path and, in a terminal, a URL that signs you in once.</p>
    <${Form} verb="Sign in" act=${act} onDone=${onDone}>
      <${Field} label="Token"><input ref=${(field) => field && field.focus()} name="token" type="password" autocomplete="off" required /><//><//>
  </div></main>`;
}

// -- The frame of the page: navigation, sign-in, keyboard, and the page that the URL names.
const PAGES = [
  ["runs", "Runs", RunsPage],
  ["dashboard", "Dashboard", DashboardPage],
  ["approvals", "Approvals", ApprovalsPage],
  ["queue", "Queue", QueuePage],
  ["workers", "Workers", WorkersPage],
  ["schedules", "Schedules", SchedulesPage],
  ["pools", "Pools", PoolsPage],
  ["dead", "Dead", DeadPage],
  ["usage", "Usage", UsagePage],
  ["agents", "Agents", AgentsPage],
  ["about", "About", AboutPage],
];

function Navigation({ current, queue }) {
  const about = useContext(About);
  const [open, setOpen] = useState(false);
  const { waiting = {}, by_status: { dead = 0 } = {} } = queue || {};
  const numbers = { approvals: [(waiting.approval || 0) + (waiting.in_doubt || 0), "waiting for an answer"], dead: [dead, "dead"] };
  return html`<header class=${open ? "side open" : "side"}>
    <a class="brand" href=${href(["runs"])}><img src="static/favicon.svg" alt="" width="20" height="20" />Agent runtime</a>
    <button type="button" class="button menu-button" aria-expanded=${open} onClick=${() => setOpen(!open)}>Menu</button>
    <nav class="menu" aria-label="Pages" onClick=${() => setOpen(false)}>
      ${PAGES.map(([name, label]) => {
        const [number, what] = numbers[name] || [0];
        return html`<a key=${name} href=${href([name])} aria-current=${name === current ? "page" : null}>${label}
          ${number > 0 && html`<span class="menu-count" title=${`${count(number)} ${what}`}>${count(number)}</span>`}</a>`;
      })}
    </nav>
    ${about.read_only && html`<span class="badge" title="No action changes this store">read-only</span>`}
  </header>`;
}

/** Show a failure of a page in its place: the navigation and the other pages still work. */
function Guarded({ route, children }) {
  const [error, retry] = useErrorBoundary((failure) => console.error(failure));
  useEffect(() => error && retry(), [route]);
  return error ? html`<${Failed} error=${error} retry=${retry} />` : children;
}

function Page({ route }) {
  // A file has one run: every other page leads to it.
  const [name, ...rest] = source.exported && route.path.length < 2 ? ["runs", source.about.run_id] : route.path;
  if (name === "runs" && rest.length) return html`<${RunPage} key=${rest[0]} route=${route} runId=${rest[0]} tab=${rest[1]} />`;
  if (name === "compare") return html`<${ComparePage} route=${route} runId=${rest[0]} otherId=${rest[1]} />`;
  const found = PAGES.find(([each]) => each === name);
  if (!found) return html`<${Empty} title="There is no such page.">See the <a href=${href(["runs"])}>runs</a>.<//>`;
  return html`<${found[2]} route=${route} />`;
}

/** Move the focus to a new page, so that the keyboard and a screen reader begin there. */
function useArrival(place) {
  const main = useRef(null);
  const before = useRef(place);
  useLayoutEffect(() => {
    if (before.current === place) return;
    before.current = place;
    scrollTo(0, 0);
    if (main.current) main.current.focus({ preventScroll: true });
  }, [place]);
  return main;
}

/** Everything around a page. The numbers of the queue are read here, once for all pages. */
function Frame({ route }) {
  const queue = useQuery(source.exported ? null : "queue", {}, { every: 5000 });
  const [help, setHelp] = useState(false);
  const main = useArrival(route.path.slice(0, 2).join("/"));
  useKeys(() => setHelp(true));
  // The same page as before unless the route changes: new numbers then render only what shows them.
  const page = useMemo(() => html`<${Page} route=${route} />`, [route]);
  return html`<${Queue.Provider} value=${queue}>
    ${!source.exported && html`<${Navigation} current=${route.path[0]} queue=${queue.data} />`}
    <main id="main" ref=${main} tabindex="-1">${source.exported && html`<${ExportedNote} />`}<${Guarded} route=${route}>${page}<//></main>
    ${help && html`<${Help} onClose=${() => setHelp(false)} />`}
  <//>`;
}

function App() {
  const route = useRoute();
  const [state, setState] = useState({ about: null, error: null, ended: false });
  const load = async () => {
    setState({ about: null, error: null, ended: false });
    try {
      await exchangeCode();
      const about = await source.get("about");
      setState({ about, error: null, ended: false });
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      setState({ about: null, error, ended: false });
    }
  };
  useEffect(() => {
    load();
    // Any request may find that the session has ended. Before the page is shown, `load` finds it by itself.
    const ended = () => setState((before) => (before.about ? { about: null, error: null, ended: true } : before));
    addEventListener("signed-out", ended);
    return () => removeEventListener("signed-out", ended);
  }, []);
  useEffect(() => {
    // The printed URL was opened in a tab that has the page already.
    if (location.hash.startsWith("#code=")) load();
  }, [route]);
  const signIn = state.ended || (state.error && state.error.status === 401);
  if (signIn) return html`<${SignIn} ended=${state.ended} onDone=${load} />`;
  if (state.about) return html`<${About.Provider} value=${state.about}><${Frame} route=${route} /><//>`;
  return html`<main class="alone">${state.error ? html`<${Failed} error=${state.error} retry=${load} />` : html`<${Loading} />`}</main>`;
}

history.scrollRestoration = "manual"; // the pages load after the browser would scroll
if (source.exported) document.body.classList.add("exported");
render(html`<${App} />`, document.getElementById("app"));
