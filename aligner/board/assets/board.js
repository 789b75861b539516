// The frame: tabs, shared state of pages, and access to the server or to the answers inside a report.

import { el } from "board/dom.js";

const inlined = JSON.parse(document.getElementById("inlined").textContent);
const main = document.querySelector("main");
const problem = el("p", {class: "problem", role: "alert", hidden: true});
const panels = new Map(); // tab -> its element
const LATEST = 6; // runs that are chosen initially
const REPORT = inlined.answers !== null;

async function request(name, args, signal) {
  const reply = await fetch(`api/${name}`, {
    method: "POST",
    headers: {"content-type": "application/json"},
    body: JSON.stringify(args),
    signal,
  });
  if (!reply.ok) throw new Error(reply.status === 500 ? "the board failed: see its terminal" : (await reply.json()).error);
  return reply;
}

export const api = {
  report: REPORT,

  // An endpoint's answer. In a report: the answer to the report's request, from which a page takes its share.
  async ask(name, args = {}) {
    if (REPORT) return inlined.answers[name];
    return (await request(name, args)).json();
  },

  // The same for an endpoint that streams, event by event.
  async *stream(name, args = {}, signal = undefined) {
    const reply = await request(name, args, signal);
    const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let text = ""; ;) {
      const {value, done} = await reader.read();
      const lines = (text += value ?? "").split("\n");
      text = lines.pop();
      for (const line of lines) {
        const event = JSON.parse(line);
        if (event.error !== undefined) throw new Error(event.error);
        yield event;
      }
      if (done) return;
    }
  },

  // Does `work` now, and again every `seconds` while `element`, a page, is visible; in a report once. Errors are
  // shown; if it returns true, it runs again at once. Returns a function that runs it at once.
  every(seconds, element, work) {
    let busy = false, waiting = false;
    const once = async () => {
      if (!REPORT && (document.hidden || element.hidden)) return;
      waiting = busy;
      if (busy) return;
      busy = true;
      let again = false;
      try {
        again = await work();
        problem.hidden = true;
      } catch (error) {
        api.fail(error);
      }
      busy = false;
      if (waiting) await once();
      else if (again) setTimeout(once, 100);
    };
    once();
    if (REPORT) return once;
    element.addEventListener("shown", once);
    document.addEventListener("visibilitychange", once);
    setInterval(once, seconds * 1000);
    return once;
  },

  well() {
    problem.hidden = true;
  },

  fail(error) {
    problem.textContent = error instanceof TypeError ? `the board does not answer (${error.message})` : error.message;
    problem.hidden = false;
  },

  // Where the reader is: #tab?key=value&..., so that it can be bookmarked.
  place() {
    const [tab, text] = location.hash.slice(1).split("?");
    return {tab: inlined.tabs.includes(tab) ? tab : inlined.tabs[0], args: new URLSearchParams(text ?? "")};
  },

  go(tab, args = {}) {
    const text = new URLSearchParams(args).toString();
    location.hash = text ? `${tab}?${text}` : tab;
  },

  // Runs chosen in the table, which all pages show: a Set of names. `choose` notifies listeners.
  chosen: new Set(),
  choose(names) {
    api.chosen = new Set(names);
    document.dispatchEvent(new Event("chosen"));
  },
};

async function panel(tab) {
  if (!panels.has(tab)) {
    const made = el("section", {id: `page-${tab}`, "aria-label": tab});
    panels.set(tab, made);
    main.append(made);
    const page = await import(`board/${tab}.js`);
    await page.mount(made, api);
  }
  return panels.get(tab);
}

async function show() {
  const {tab} = api.place();
  for (const link of document.querySelectorAll("nav a"))
    if (link.hash === `#${tab}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  for (const [name, made] of panels) made.hidden = name !== tab;
  (await panel(tab)).dispatchEvent(new Event("shown"));
}

// Choose initially all runs of a report, and the latest of a board.
async function first() {
  const {runs} = await api.ask("runs");
  const latest = [...runs].sort((a, b) => (a.started < b.started) - (a.started > b.started)).slice(0, LATEST);
  api.chosen = new Set(runs.filter((run) => REPORT || latest.includes(run)).map((run) => run.name));
}

// A report is one long page, which prints; the board shows a tab at a time.
export async function start() {
  main.before(problem);
  const nav = document.querySelector("nav");
  nav.append(...inlined.tabs.map((tab) => el("a", {href: REPORT ? `#page-${tab}` : `#${tab}`}, tab)));
  await first().catch(api.fail);
  if (REPORT) for (const tab of inlined.tabs) await panel(tab);
  else {
    addEventListener("hashchange", () => show().catch(api.fail));
    await show().catch(api.fail);
  }
  document.documentElement.dataset.ready = "true"; // for tests
}
