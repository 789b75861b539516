// Tokens of one text, coloured by a number of each; all numbers of one are read by pointing at it, or with the arrow keys.

import { el, number } from "board/dom.js";

const SHARE = 45; // percent of the colour at the largest number: the text stays readable

// {texts, ids, made, numbers: name -> values, cut} -> {element, numbers, paint(name, largest)}. `names`: their labels.
export function tokens({texts, ids, made, numbers, cut}, names) {
  const spans = texts.map((text, i) => el("span", {class: made[i] ? "token" : "token given", "data-i": i}, text));
  const line = el("p", {class: "numbers", "aria-live": "polite"}, "\u00a0");
  const box = el("pre", {class: "tokens", tabindex: 0, role: "group", "aria-label": "tokens: arrow keys show the numbers of each"},
    spans, cut ? el("span", {class: "dim"}, " ... (the rest is not shown)") : null);
  let at = -1;

  function tell(i) {
    if (!(i in spans)) return;
    spans[at]?.classList.remove("at");
    at = i;
    spans[at].classList.add("at");
    const known = Object.entries(numbers).filter(([, values]) => values[i] !== null);
    const words = known.map(([name, values]) => `${names[name] ?? name} ${number(values[i])}`);
    line.textContent = [`${JSON.stringify(texts[i])}${ids ? ` (${ids[i]})` : ""}`, ...(made[i] ? words : ["not of the policy"])].join(" \u00b7 ");
  }
  box.addEventListener("pointerover", (event) => event.target.dataset.i && tell(Number(event.target.dataset.i)));
  box.addEventListener("click", (event) => event.target.dataset.i && tell(Number(event.target.dataset.i)));
  box.addEventListener("keydown", (event) => {
    const step = {ArrowRight: 1, ArrowLeft: -1}[event.key];
    if (!step) return;
    event.preventDefault();
    tell(Math.min(spans.length - 1, Math.max(0, at + step)));
  });

  return {
    element: el("div", {}, box, line),
    numbers,
    paint(name, largest) {
      const values = numbers[name];
      spans.forEach((span, i) => {
        const value = values?.[i] ?? 0;
        const share = largest > 0 ? Math.round(SHARE * Math.min(1, Math.abs(value) / largest)) : 0;
        span.style.background = share ? `color-mix(in srgb, var(${value > 0 ? "--more" : "--less"}) ${share}%, transparent)` : "";
      });
    },
  };
}
