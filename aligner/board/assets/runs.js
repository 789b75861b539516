// The table of runs.

import { el, table } from "board/dom.js";

export function mount(element, api) {
  api.every(5, element, async () => {
    const {runs} = await api.ask("runs");
    element.replaceChildren(table(["run", "folder"], runs.map((run) => [run.name, run.folder])));
  });
}
