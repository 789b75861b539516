import { el } from "board/dom.js";

export function mount(element, api) {
  element.append(el("p", {}, "compose"));
}
