// Elements from data: texts become text nodes, never markup.

// el("td", {class: "number", onclick: f}, "text", child, [children], null)
export function el(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return made;
}

// A name that may break behind what joins its words, and nowhere else.
export function breakable(name) {
  return name.split(/(?<=[/_.-])/).flatMap((word, i) => (i ? [el("wbr"), word] : [word]));
}

// At most four digits, large ones with k, M, G or T; "" for what is none.
export function number(value) {
  if (typeof value !== "number" || !Number.isFinite(value)) return "";
  for (const [limit, unit, scale] of [[1e12, "T", 1e12], [1e9, "G", 1e9], [1e6, "M", 1e6], [1e4, "k", 1e3]])
    if (Math.abs(value) >= limit) return `${Number((value / scale).toPrecision(4))}${unit}`;
  return String(Number(value.toPrecision(4)));
}

export function bytes(value) {
  return Math.abs(value) >= 2 ** 30 / 100 ? `${Number((value / 2 ** 30).toPrecision(3))} GiB`
    : `${Number((value / 2 ** 20).toPrecision(3))} MiB`;
}

// A metric's value in units for people.
export function shown(name, value) {
  return name.endsWith("_bytes") && typeof value === "number" ? bytes(value) : number(value);
}

export function duration(seconds) {
  if (typeof seconds !== "number") return "";
  if (seconds < 60) return `${Number(seconds.toPrecision(3))} s`;
  const minutes = Math.floor(Math.round(seconds) / 60);
  return minutes < 60 ? `${minutes} min ${Math.round(seconds) % 60} s` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

// rows of cells (texts or elements); the first row and the first column are heads
export function table(head, rows, name = "table") {
  const body = rows.map((row) => el("tr", {}, row.map((cell, i) => el(i ? "td" : "th", i ? {} : {scope: "row"}, cell))));
  return el("div", {class: "scroll", tabindex: 0, role: "region", "aria-label": name},
    el("table", {}, el("thead", {}, el("tr", {}, head.map((cell) => el("th", {scope: "col"}, cell)))), el("tbody", {}, body)));
}
