// The table of runs: choose, filter, sort; and details of the chosen runs.

import { breakable, bytes, duration, el, number, shown, table } from "board/dom.js";

const percent = (value) => (typeof value === "number" ? `${(100 * value).toFixed(0)} %` : "");

// name -> [sort value, shown value]
function columns(headline, several) {
  return {
    run: [(row) => row.name, (row) => row.name],
    ...(several ? {chain: [(row) => row.chain, (row) => row.chain]} : {}),
    stage: [(row) => row.stage, (row) => row.stage],
    state: [(row) => row.state, (row) => (row.job && /^[A-Z]/.test(row.state) && row.state !== "DONE" ? `${row.state} (job ${row.job})` : row.state)],
    step: [(row) => row.step, (row) => `${row.step ?? 0}${row.steps ? ` / ${row.steps}` : ""}`],
    left: [(row) => row.left_s, (row) => duration(row.left_s)],
    alarms: [(row) => row.alarms, (row) => (row.alarms ? el("span", {class: "alarm"}, String(row.alarms)) : "")],
    "s/step": [(row) => row.step_s, (row) => number(row.step_s)],
    "tokens/s": [(row) => row.tokens_per_s, (row) => number(row.tokens_per_s)],
    goodput: [(row) => row.goodput, (row) => percent(row.goodput)],
    memory: [(row) => row.peak_bytes, (row) => (row.peak_bytes ? bytes(row.peak_bytes) : "")],
    ...Object.fromEntries(headline.map((name) => [name, [(row) => row.last[name], (row) => number(row.last[name])]])),
    from: [(row) => Object.values(row.from).join(), (row) => Object.entries(row.from).map(([key, run]) => `${run} (${key})`).join(", ")],
    started: [(row) => row.started, (row) => row.started.replace("T", " ").replace(/[+]00:00$/, "")],
    result: [(row) => row.result, (row) => [row.result, ...row.damage.map((text) => el("div", {class: "problem"}, text))]],
  };
}

// Unknown values come last, in either order.
function compare(a, b, down) {
  const empty = (value) => value === null || value === undefined || value === "";
  if (empty(a) || empty(b)) return empty(a) - empty(b);
  const order = typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), undefined, {numeric: true});
  return down ? -order : order;
}

export function mount(element, api) {
  const filter = el("input", {type: "search", placeholder: "filter, e.g. grpo running", "aria-label": "filter runs", oninput: () => lay()});
  const body = el("div"), note = el("p", {class: "dim", role: "status"}), below = el("div");
  let listed = {runs: [], headline: [], folders: []}, sorted = "started", down = !api.report;

  const all = el("button", {onclick: () => choose(visible().map((row) => row.name))}, "choose all");
  const none = el("button", {onclick: () => choose([])}, "choose none");
  if (!api.report) element.append(el("div", {class: "controls"}, filter, all, none));
  element.append(note, body, below);

  function visible() {
    const shownColumns = columns(listed.headline, true);
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    const text = (row) => Object.values(shownColumns).map(([value]) => value(row) ?? "").join(" ").toLowerCase();
    const rows = listed.runs.filter((row) => words.every((word) => text(row).includes(word)));
    const [by] = shownColumns[sorted] ?? [];
    return by ? rows.sort((a, b) => compare(by(a), by(b), down)) : rows;
  }

  function choose(names) {
    api.choose(listed.runs.map((row) => row.name).filter((name) => names.includes(name))); // in the order of their starts
    lay();
  }

  function sort(name) {
    down = sorted === name && !down;
    sorted = name;
    lay();
  }

  function lay() {
    const focus = document.activeElement?.dataset?.key;
    const several = new Set(listed.runs.map((row) => row.chain)).size > 1;
    const shownColumns = columns(listed.headline, several);
    for (const [name, [, show]] of Object.entries(shownColumns)) // empty in all rows
      if (!["run", "step"].includes(name) && listed.runs.every((row) => [show(row)].flat().join("") === "")) delete shownColumns[name];
    const heads = Object.keys(shownColumns).map((name) => el("button", {"data-key": `sort ${name}`, onclick: () => sort(name)},
      name, sorted === name ? (down ? " ▾" : " ▴") : ""));
    const rows = visible().map((row) => [
      api.report ? el("span", {class: "choice"}, el("span", {}, breakable(row.name))) : el("label", {class: "choice"}, el("input", {type: "checkbox", checked: api.chosen.has(row.name), "data-key": `choose ${row.name}`,
        onchange: (event) => {
          event.target.checked ? api.chosen.add(row.name) : api.chosen.delete(row.name);
          api.choose(listed.runs.map((each) => each.name).filter((name) => api.chosen.has(name)));
        }}), el("span", {}, breakable(row.name))),
      ...Object.entries(shownColumns).filter(([name]) => name !== "run").map(([, [, show]]) => show(row)),
    ]);
    body.replaceChildren(listed.runs.length ? table(api.report ? Object.keys(shownColumns) : heads, rows, "table of runs") : "");
    body.querySelectorAll("thead th").forEach((th, i) => {
      if (Object.keys(shownColumns)[i] === sorted) th.setAttribute("aria-sort", down ? "descending" : "ascending");
    });
    if (focus) [...body.querySelectorAll("[data-key]")].find((each) => each.dataset.key === focus)?.focus();
    const share = listed.runs.reduce((sum, row) => sum + row.read, 0) / (listed.runs.length || 1);
    note.textContent = !listed.runs.length ? `No runs in ${listed.folders.join(", ")} yet.`
      : share < 1 ? `${listed.runs.length} runs; read so far: ${(100 * share).toFixed(0)} %` : api.report ? "" : `${listed.runs.length} runs, ${api.chosen.size} chosen`;
    return share;
  }

  async function tell() {
    const runs = [...api.chosen];
    const {details, differ, summary} = await api.ask("details", {runs});
    const names = runs.filter((name) => details[name]);
    const open = new Set([...below.querySelectorAll("details[open]")].map((each) => each.dataset.key));
    const folded = (key, title, inside) => el("details", {"data-key": key, open: open.has(key)}, el("summary", {}, title), inside);
    const keys = [...new Set(names.flatMap((name) => Object.keys(details[name].facts)))];
    const fact = (key, value) => (key === "duration" ? duration(value) : typeof value === "number" ? number(value) : value ?? "");
    const alarms = names.flatMap((name) => details[name].alarms.map(({text}) => el("li", {class: "alarm"}, `${name}: ${text}`)));
    const parts = [el("h2", {}, "alarms"), alarms.length ? el("ul", {}, alarms) : el("p", {}, "none")];
    if (keys.length) parts.push(el("h2", {}, "origin"), table(["fact", ...names], keys.map((key) => [key, ...names.map((name) => fact(key, details[name].facts[key]))])));
    if (names.length > 1) parts.push(el("h2", {}, "config that differs"), Object.keys(differ).length
      ? table(["key", ...names], Object.entries(differ).map(([key, row]) => [key, ...names.map((name) => row[name] ?? "")])) : el("p", {}, "none"));
    if (Object.keys(summary).length) parts.unshift(el("h2", {}, "summary"),
      table(["result", "value"], Object.entries(summary).map(([key, value]) => [key, typeof value === "number" ? shown(key, value) : value])));
    for (const name of names) if (details[name].config) parts.push(folded(`config ${name}`, `config of ${name}`, el("pre", {}, details[name].config)));
    for (const name of names) for (const [file, text] of Object.entries(details[name].logs ?? {}))
      parts.push(folded(`log ${name} ${file}`, `end of ${file} of ${name}`, el("pre", {class: "log"}, text)));
    if (names.length) below.replaceChildren(...parts);
    else below.replaceChildren();
  }

  const again = api.every(5, element, async () => {
    listed = await api.ask("runs");
    const share = lay();
    await tell();
    return share < 1;
  });
  document.addEventListener("chosen", () => again());
}
