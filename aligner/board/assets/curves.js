// Curves of the chosen runs, by groups of metrics, and where the seconds of a step go.

import { duration, el, number, shown, table } from "board/dom.js";
import { Chart, between, colorClass } from "board/plot.js";

const OPEN = new Set(["eval", "reward", "sft", "rm", "dpo", "kto", "distill"]); // groups that are open initially
const CLOCKS = {step: "step", hours: "hours since its start", tokens: "tokens", date: "date"};

export function mount(element, api) {
  const filter = el("input", {type: "search", placeholder: "metrics, e.g. reward kl", "aria-label": "filter metrics", oninput: () => again()});
  const clock = el("select", {"aria-label": "x axis", onchange: () => draw()}, Object.entries(CLOCKS).map(([key, name]) => el("option", {value: key}, name)));
  const smoothing = el("input", {type: "range", min: 0, max: 0.99, step: 0.01, value: 0, oninput: () => draw()});
  const logx = el("input", {type: "checkbox", onchange: () => draw()});
  const logy = el("input", {type: "checkbox", onchange: () => draw()});
  const legend = el("div", {class: "controls", role: "group", "aria-label": "runs shown"});
  const groups = el("div"), times = el("div"), note = el("p", {class: "dim", role: "status"});
  const charts = new Map(); // metric -> Chart
  const hidden = new Set(); // runs
  const blocks = new Map(); // group -> {details, grid, still}
  let names = [], rows = [], drawable = {curves: {}, clocks: {}}, wide = {};

  element.append(
    el("div", {class: "controls"}, el("label", {}, "metrics", filter), el("label", {}, "x", clock), el("label", {}, "smoothing", smoothing),
      el("label", {}, logy, "log y"), el("label", {}, logx, "log x")),
    legend, note, groups, times);

  function keys() {
    const buttons = names.map((name, i) => el("button", {
      "aria-pressed": String(!hidden.has(name)),
      onclick: (event) => {
        hidden.has(name) ? hidden.delete(name) : hidden.add(name);
        event.currentTarget.setAttribute("aria-pressed", String(!hidden.has(name)));
        draw();
      },
    }, el("span", {class: `swatch ${colorClass(i)}`}), name));
    legend.replaceChildren(...buttons);
  }

  const wanted = (name) => filter.value.toLowerCase().split(/\s+/).every((word) => name.toLowerCase().includes(word));

  function block(group) {
    if (!blocks.has(group)) {
      const grid = el("div", {class: "charts"}), still = el("details", {class: "still"});
      const details = el("details", {open: api.report || OPEN.has(group), ontoggle: () => again()},
        el("summary", {}, el("h2", {}, group)), grid, still);
      blocks.set(group, {details, grid, still});
    }
    return blocks.get(group);
  }

  // Make groups and charts for the existing metrics; return those to be drawn.
  function lay() {
    const moving = rows.filter((row) => row.still === null && wanted(row.name));
    const still = rows.filter((row) => row.still !== null && wanted(row.name));
    const order = [...new Set(rows.filter((row) => wanted(row.name)).map((row) => row.name.split("/")[0]))];
    if (filter.value) for (const group of order) block(group).details.open = true;
    const drawn = [];
    for (const group of order) {
      const {details, grid, still: folded} = block(group);
      const own = moving.filter((row) => row.name.split("/")[0] === group);
      const same = still.filter((row) => row.name.split("/")[0] === group);
      if (details.open) for (const row of own) drawn.push(row.name);
      const figures = details.open ? own.map((row) => chart(row.name).figure) : [];
      if (figures.length !== grid.children.length || figures.some((figure, i) => figure !== grid.children[i])) grid.replaceChildren(...figures);
      folded.hidden = !same.length;
      folded.replaceChildren(el("summary", {}, `constant metrics: ${same.length}`),
        table(["metric", "value"], same.map((row) => [row.name, shown(row.name, row.still)])));
    }
    const shownNow = order.map((group) => block(group).details);
    if (shownNow.length !== groups.children.length || shownNow.some((each, i) => each !== groups.children[i])) groups.replaceChildren(...shownNow);
    return drawn;
  }

  function chart(name) {
    if (!charts.has(name)) {
      const made = new Chart(name, {format: (value) => shown(name, value)});
      made.onwiden = () => again();
      charts.set(name, made);
    }
    return charts.get(name);
  }

  // steps -> the x of the clock chosen
  function along(run, steps) {
    const {wall, tokens, begun} = drawable.clocks[run] ?? {};
    const clocks = {
      step: (step) => step,
      hours: (step) => (wall ? between(wall, step) / 3600 : null),
      tokens: (step) => (tokens ? between(tokens, step) : null),
      date: (step) => (wall && begun !== null ? begun + between(wall, step) : null),
    };
    return steps.map(clocks[clock.value]);
  }

  function draw() {
    const options = {logx: logx.checked, logy: logy.checked, smoothing: Number(smoothing.value), dates: clock.value === "date",
      unit: clock.value === "date" ? "" : clock.value};
    for (const [name, made] of charts) {
      if (!made.isConnected) continue;
      const last = rows.find((row) => row.name === name)?.last ?? {};
      const curves = names.map((run, index) => ({run, index, curve: wide[name]?.[run]?.[name] ?? drawable.curves[run]?.[name]}))
        .filter(({run, curve}) => curve && !hidden.has(run))
        .map(({run, index, curve}) => ({name: run, index, x: along(run, curve.x), y: curve.y, last: last[run]}));
      made.show(curves, options);
    }
  }

  const breakdowns = new Map(); // run -> {chart, figure, key}
  function breakdown(phases) {
    const figures = names.filter((name) => phases[name] && !hidden.has(name)).map((name) => {
      const {x, layers, seconds} = phases[name];
      const order = Object.keys(seconds).sort((a, b) => seconds[b] - seconds[a]);
      const whole = order.reduce((sum, key) => sum + seconds[key], 0);
      const short = (key) => key.slice(5).replace(/_s$/, "");
      if (!breakdowns.has(name)) {
        const made = new Chart(`${name}: seconds of a step`, {stacked: true, format: (value) => `${number(value)} s`});
        breakdowns.set(name, {made, key: el("div")});
        breakdowns.get(name).figure = el("div", {class: "breakdown"}, made.figure, breakdowns.get(name).key);
      }
      const {made, key, figure} = breakdowns.get(name);
      key.replaceChildren(table(["phase", "total", "share"], order.map((phase, i) => [
        el("span", {}, el("span", {class: `swatch ${colorClass(i)}`}), short(phase)), duration(seconds[phase]), `${(100 * seconds[phase] / whole).toFixed(1)} %`])));
      return {figure, show: () => made.show(order.map((phase, index) => ({name: phase, index, x, y: layers[phase]})), {unit: "step"})};
    });
    times.replaceChildren(...(figures.length ? [el("h2", {}, "where the time goes")] : []), ...figures.map((figure) => figure.figure));
    for (const figure of figures) figure.show();
  }

  const again = api.every(5, element, async () => {
    const runs = [...api.chosen];
    if (runs.join("\n") !== names.join("\n")) {
      names = runs;
      keys();
    }
    const listed = await api.ask("metrics", {runs});
    rows = listed.metrics;
    const metrics = lay();
    const points = Math.max(100, Math.min(400, Math.floor(200_000 / (1 + runs.length * metrics.length))));
    drawable = await api.ask("curves", {runs, metrics, points});
    const large = metrics.filter((name) => charts.get(name).figure.classList.contains("wide"));
    wide = {};
    if (!api.report) for (const name of large) wide[name] = (await api.ask("curves", {runs, metrics: [name], points: 2000})).curves;
    draw();
    breakdown((await api.ask("phases", {runs})).phases);
    const share = Object.values(listed.read).reduce((sum, each) => sum + each, 0) / (runs.length || 1);
    note.textContent = !runs.length ? "Choose runs on the page of runs." : !rows.length && share === 1 ? "No metrics yet." : share < 1 ? `read so far: ${(100 * share).toFixed(0)} %` : "";
    return share < 1;
  });
  document.addEventListener("chosen", () => again());
}
