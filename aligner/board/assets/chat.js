// One conversation with one or two models side by side; each continues from its own responses.

import { el } from "board/dom.js";
import { tokens } from "board/tokens.js";

const UNLIKELY = 6; // nats at which a token has the full colour
const NAMES = {logprob: "logprob", probability: "probability"};

export async function mount(element, api) {
  const {models, open} = await api.ask("talks");
  const controls = {
    temperature: el("input", {type: "number", min: 0, step: 0.1, placeholder: "the run's"}),
    top_p: el("input", {type: "number", min: 0, max: 1, step: 0.05, placeholder: "the run's"}),
    max_tokens: el("input", {type: "number", min: 1, step: 1, placeholder: "the run's"}),
    seed: el("input", {type: "number", min: 0, step: 1, placeholder: "any"}),
  };
  const system = el("input", {size: 24, placeholder: "none"});
  const coloured = el("input", {type: "checkbox", checked: true, onchange: () => slots.forEach((slot) => slot.paint())});
  const message = el("textarea", {rows: 3, "aria-label": "message", placeholder: "Enter sends, Shift+Enter begins a line",
    onkeydown: (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      send();
    }});
  const sends = el("button", {type: "button", onclick: send}, "send");
  const ends = el("button", {type: "button", hidden: true, onclick: () => abort.abort()}, "stop");
  const again = el("button", {type: "button", onclick: () => {
    abort.abort();
    slots.forEach((slot) => slot.clear());
  }}, "new chat");
  let abort = new AbortController();
  const slots = [slotOf("model", open[0] ?? ""), slotOf("second model", open[1] ?? "")];
  const settings = Object.entries(controls).map(([name, input]) => el("label", {}, name, input));
  element.append(
    el("div", {class: "controls"}, settings, el("label", {}, "system", system), el("label", {}, "colour by probability", coloured)),
    el("div", {class: "talks"}, slots.map((slot) => slot.element)),
    el("div", {class: "message"}, message, el("div", {class: "controls"}, sends, ends, again)));
  const none = el("p", {class: "dim", hidden: models.length > 0}, "No models: the board's folders have no finished run (run.export), checkpoint or Hugging Face folder.");
  element.prepend(none);
  element.addEventListener("shown", () => api.ask("talks").then(({models: names}) => { // runs may have ended meanwhile
    none.hidden = names.length > 0;
    slots.forEach((slot) => slot.offer(names));
  }).catch(api.fail));

  async function send() {
    const text = message.value.trim(), wanted = slots.filter((slot) => slot.named());
    if (!text || sends.disabled) return;
    if (!wanted.length) return api.fail(new Error("choose a model first"));
    api.well();
    sends.disabled = true;
    await Promise.all(wanted.map((slot) => slot.opened())); // wait for models that are loading
    const talking = slots.filter((slot) => slot.ready());
    if (!talking.length) {
      sends.disabled = false;
      if (slots.some((slot) => slot.named())) api.fail(new Error("the model could not be opened: choose another"));
      return;
    }
    message.value = "";
    ends.hidden = false;
    abort = new AbortController();
    await Promise.all(talking.map((slot) => slot.say(text)));
    sends.disabled = false;
    ends.hidden = true;
    message.focus();
  }

  function sampling() {
    const set = Object.entries(controls).filter(([, input]) => input.value !== "");
    return Object.fromEntries(set.map(([name, input]) => [name, Number(input.value)]));
  }

  function slotOf(label, chosen) {
    const log = el("div", {class: "talk", role: "log", "aria-label": `chat with ${label}`, tabindex: 0});
    const state = el("span", {class: "dim", role: "status"}, chosen ? "ready" : "");
    const select = el("select", {onchange: () => { opened = change(select.value); }});
    const offer = (names) => select.replaceChildren(...["", ...names].map((name) => el("option", {value: name, selected: name === named}, name || "none")));
    let named = chosen, model = chosen, history = [], painted = [], opening = 0, opened = Promise.resolve();

    async function change(name) {
      const turn = ++opening, before = named;
      named = name;
      model = "";
      clear();
      api.well();
      try {
        if (before && slots.every((slot) => slot.named() !== before)) await api.ask("close_talk", {model: before});
        state.textContent = name ? "loading; messages are answered afterwards" : "";
        const reply = name ? await api.ask("open_talk", {model: name}) : null;
        if (turn !== opening) return;
        model = name;
        state.textContent = !reply ? "" : reply.plain ? "ready; it has no chat template: each message is a prompt of its own" : "ready";
      } catch (error) {
        if (turn === opening) state.textContent = error.message;
      }
    }

    function clear() {
      history = [];
      painted = [];
      log.replaceChildren();
    }

    async function say(text) {
      const answer = el("pre", {});
      const made = el("div", {class: "turn own"}, el("small", {}, model), answer);
      log.append(el("div", {class: "turn"}, el("small", {}, "you"), el("pre", {}, text)), made);
      const messages = [...(system.value ? [{role: "system", content: system.value}] : []), ...history, {role: "user", content: text}];
      const own = history; // of this chat: it may be cleared meanwhile
      const keep = () => own.push({role: "user", content: text}, {role: "assistant", content: answer.textContent});
      try {
        for await (const event of api.stream("say", {model, messages, ...sampling()}, abort.signal)) {
          if (event.text !== undefined) answer.textContent += event.text;
          else {
            const numbers = {logprob: event.logprobs, probability: event.logprobs.map(Math.exp)};
            const shown = tokens({texts: event.tokens, made: event.tokens.map(() => true), numbers}, NAMES);
            if (own === history) painted.push(shown);
            answer.replaceWith(shown.element);
            if (event.reason === "length") made.append(el("small", {}, "cut by max_tokens"));
            keep();
            paint();
          }
        }
      } catch (error) {
        if (error.name === "AbortError" && answer.textContent) keep(); // the model gets the text that the reader sees
        made.append(el("p", {class: "problem"}, error.name === "AbortError" ? "stopped" : error.message));
      }
      log.scrollTop = log.scrollHeight;
    }

    offer(models);

    function paint() {
      for (const shown of painted) shown.paint(coloured.checked ? "logprob" : "", UNLIKELY);
    }

    return {element: el("div", {}, el("div", {class: "controls"}, el("label", {}, label, select), state), log),
      ready: () => model !== "", named: () => named, opened: () => opened, offer, say, clear, paint};
  }
}
