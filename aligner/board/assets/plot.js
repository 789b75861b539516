// Curves, by uPlot. Names of runs and metrics never reach it: all text is set here.

import { el, number } from "board/dom.js";

const COLORS = 10;
const probe = el("span", {hidden: true});
const drawn = new Set(); // charts, for a change of colours
document.body.append(probe);

// The class of the n-th run's colour (board.css), also of its key in a legend.
export const colorClass = (index) => `c${index % COLORS}`;
const dash = (index) => [[], [8, 4], [2, 3], [12, 3, 2, 3]][Math.floor(index / COLORS) % 4];

// A colour of the style sheet, as the canvas takes it.
function color(name) {
  probe.style.color = `var(--${name})`;
  return getComputedStyle(probe).color;
}

function recolor() {
  for (const plot of drawn) if (plot.isConnected) plot.redraw();
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", recolor);
for (const [event, printing] of [["beforeprint", true], ["afterprint", false]])
  addEventListener(event, () => {
    document.documentElement.classList.toggle("printing", printing);
    recolor();
  });

// Values with the weight of those before them falling by `keep` each; gaps stay.
export function smooth(values, keep) {
  let sum = 0, weight = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = keep * sum + (1 - keep) * value;
    weight = keep * weight + 1 - keep;
    return sum / weight;
  });
}

// y at x between points of a rising curve
export function between({x, y}, at) {
  let low = 0, high = x.length - 1;
  if (high < 0) return null;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (x[middle] < at) low = middle + 1;
    else high = middle;
  }
  if (low === 0 || x[low] === at || at > x[low]) return y[low];
  const share = (at - x[low - 1]) / (x[low] - x[low - 1]);
  return y[low - 1] + share * (y[low] - y[low - 1]);
}

// A figure of curves {name, index (colour), x, y (null: a gap)}. `format` writes a value for people.
export class Chart {
  constructor(title, {format = number, stacked = false, height = 200} = {}) {
    this.format = format;
    this.stacked = stacked;
    this.height = height;
    this.options = {};
    this.caption = el("span", {class: "dim"});
    this.reset = el("button", {hidden: true, onclick: () => this.zoom(null)}, "whole");
    this.wide = el("button", {"aria-pressed": "false", "aria-label": `${title}: wider`, onclick: () => this.widen()}, "⤢");
    this.place = el("div", {class: "plot", tabindex: 0, role: "img", "aria-label": title, onkeydown: (e) => this.key(e)});
    this.figure = el("figure", {}, el("figcaption", {}, el("b", {}, title), " ", this.caption, this.reset, this.wide), this.place);
    new ResizeObserver(() => this.plot && this.plot.setSize(this.size())).observe(this.place);
    drawn.add(this);
  }

  get isConnected() {
    return this.figure.isConnected;
  }

  size() {
    return {width: Math.max(120, this.place.clientWidth), height: this.figure.classList.contains("wide") ? 420 : this.height};
  }

  widen() {
    const wide = this.figure.classList.toggle("wide");
    this.wide.setAttribute("aria-pressed", wide);
    this.plot?.setSize(this.size());
    this.onwiden?.(wide);
  }

  redraw() {
    this.plot?.redraw(false, true);
  }

  // options: logx, logy, dates (x is seconds since the epoch), smoothing (0..1), unit (of x)
  show(curves, options = {}) {
    this.curves = curves;
    const same = this.plot && this.shape === JSON.stringify([curves.map((c) => c.index), options]);
    this.shape = JSON.stringify([curves.map((c) => c.index), options]);
    this.options = options;
    const data = this.data();
    if (same) {
      const {min, max} = this.plot.scales.x;
      this.plot.setData(data, this.reset.hidden);
      if (!this.reset.hidden) this.plot.setScale("x", {min, max});
      this.tell(this.plot.cursor.idx);
      return;
    }
    this.plot?.destroy();
    this.reset.hidden = true;
    const axis = {stroke: () => color("dim"), grid: {stroke: () => color("grid"), width: 1}, ticks: {stroke: () => color("grid"), width: 1},
      font: "11px system-ui, sans-serif"};
    const values = (_, ticks) => ticks.map((tick) => (tick === null ? "" : this.format(tick)));
    this.plot = new uPlot({
      ...this.size(),
      legend: {show: false},
      padding: [8, 18, 0, 0],
      cursor: {sync: {key: options.dates ? "dates" : options.unit ?? "x"}, points: {size: 5}, drag: {x: true, y: false}},
      scales: {
        x: {time: Boolean(options.dates), distr: options.logx ? 3 : 1},
        y: {distr: options.logy ? 3 : 1, range: this.stacked ? (_, low, high) => [0, high || 1] : undefined},
      },
      axes: [
        {...axis, size: 28, ...(options.dates ? {} : {values: (_, ticks) => ticks.map((t) => (t === null ? "" : number(t)))})},
        {...axis, size: 66, values},
      ],
      series: [{}, ...this.lines()],
      hooks: {
        setCursor: [(u) => this.tell(u.cursor.idx)],
        setScale: [(u, key) => {
          const xs = u.data[0];
          if (key === "x" && xs.length) this.reset.hidden = u.scales.x.min <= xs[0] && u.scales.x.max >= xs.at(-1);
        }],
      },
    }, data, this.place);
    this.tell(null);
  }

  lines() {
    const line = (curve, options) => ({stroke: () => color(colorClass(curve.index)), width: 1.6, dash: dash(curve.index),
      points: {show: this.stacked ? false : undefined, size: 4}, ...options});
    if (this.stacked) return [...this.curves].reverse().map((curve) => line(curve, {fill: () => color(colorClass(curve.index)), dash: []}));
    const faint = this.options.smoothing ? this.curves.map((curve) => line(curve, {alpha: 0.25, width: 1, points: {show: false}})) : [];
    return [...faint, ...this.curves.map((curve) => line(curve))];
  }

  data() {
    const {logx, logy, smoothing} = this.options;
    let curves = this.curves.map(({x, y}) => {
      const keep = x.map((v, i) => v !== null && !(logx && v <= 0) && i);
      const at = keep.filter((i) => i !== false);
      return [at.map((i) => x[i]), at.map((i) => (logy && y[i] <= 0 ? null : y[i]))];
    });
    if (this.stacked) {
      const sums = curves[0]?.[0].map(() => 0) ?? [];
      curves = curves.map(([x, y]) => [x, y.map((value, i) => (sums[i] += value))]).reverse();
    }
    if (!curves.length) return [[]];
    const smoothed = smoothing && !this.stacked ? curves.map(([x, y]) => [x, smooth(y, smoothing)]) : [];
    const tables = [...curves, ...smoothed];
    return tables.length > 1 ? uPlot.join(tables) : tables[0];
  }

  // Show the values at the cursor, or at the end.
  tell(index) {
    const several = this.curves.length > 1;
    const at = (curve) => {
      if (index === null || index === undefined) return curve.last ?? curve.y.findLast((y) => y !== null);
      const x = this.plot.data[0][index];
      const last = curve.x.findLastIndex((each) => each !== null && each <= x);
      return last < 0 ? null : curve.y[last];
    };
    const shown = this.curves.slice(0, this.stacked ? 12 : 6).map((curve) => [curve, at(curve)]).filter(([, value]) => value !== null && value !== undefined);
    const where = index === null || index === undefined || this.options.dates ? "" : `${this.options.unit ?? "step"} ${number(this.plot.data[0][index])}: `;
    this.caption.replaceChildren(where, ...shown.flatMap(([curve, value]) => [
      several ? el("span", {class: `swatch ${colorClass(curve.index)}`}) : "", several ? `${this.format(value)} ` : this.format(value)]));
  }

  zoom(range) {
    const xs = this.plot.data[0];
    const [min, max] = range ?? [xs[0], xs.at(-1)];
    this.plot.setScale("x", {min, max});
  }

  // + and - zoom, arrows move the cursor, Escape shows all, Enter makes it wider
  key(event) {
    const u = this.plot;
    if (!u || event.ctrlKey || event.metaKey || event.altKey) return;
    const {min, max} = u.scales.x, width = max - min, middle = u.cursor.left > 0 ? u.posToVal(u.cursor.left, "x") : (min + max) / 2;
    const move = (by) => u.setCursor({left: Math.min(u.bbox.width / devicePixelRatio, Math.max(0, (u.cursor.left ?? 0) + by)), top: 10});
    const acts = {
      "+": () => this.zoom([Math.max(min, middle - width / 4), Math.min(max, middle + width / 4)]),
      "-": () => this.zoom([Math.max(u.data[0][0], middle - width), Math.min(u.data[0].at(-1), middle + width)]),
      Escape: () => this.zoom(null),
      Enter: () => this.widen(),
      ArrowLeft: () => move(-8),
      ArrowRight: () => move(8),
    };
    if (acts[event.key]) {
      event.preventDefault();
      acts[event.key]();
    }
  }
}
