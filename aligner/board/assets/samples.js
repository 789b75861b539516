// Texts of the model: rows of samples.jsonl, or groups of a recorded rollout with numbers of every token.

import { duration, el, number, table } from "board/dom.js";
import { tokens } from "board/tokens.js";

const NAMES = {
  advantage: "advantage", difference: "logprob, trainer - engine", kl: "KL to the reference (k1)", entropy: "entropy",
  value: "value", return: "return", reward: "token reward", weight: "weight in the loss", logprob: "logprob (engine)",
};

export async function mount(element, api) {
  const args = api.report ? new URLSearchParams() : api.place().args;
  const asked = {run: args.get("run") ?? "", step: args.get("step") ?? "", page: 0};
  const run = el("select", {onchange: () => ask({run: run.value, step: ""})});
  const step = el("select", {onchange: () => ask({step: step.value})});
  const text = el("input", {type: "search", size: 14, oninput: () => later({text: text.value})});
  const low = el("input", {type: "number", step: "any", oninput: () => later({low: bound(low)})});
  const high = el("input", {type: "number", step: "any", oninput: () => later({high: bound(high)})});
  const order = el("select", {onchange: () => ask({order: order.value})},
    [["newest", "newest first"], ["best", "best reward"], ["worst", "worst reward"]].map(([value, name]) => el("option", {value}, name)));
  const colour = el("select", {onchange: () => paint()});
  const back = el("button", {type: "button", onclick: () => ask({page: asked.page - 1})}, "back");
  const next = el("button", {type: "button", onclick: () => ask({page: asked.page + 1})}, "more");
  const body = el("div", {});
  const colouring = el("label", {}, "colour", colour);
  const paints = []; // of each sample on the page
  let timer = 0, asking = 0;

  if (!api.report) {
    element.append(el("div", {class: "controls"}, el("label", {}, "run", run), el("label", {}, "step", step),
      el("label", {}, "prompt has", text), el("label", {}, "reward from", low), el("label", {}, "to", high),
      el("label", {}, "order", order), back, next));
  }
  element.append(el("div", {class: "controls"}, colouring), body);

  const bound = (input) => (input.value === "" ? null : Number(input.value));
  function ask(change) {
    clearTimeout(timer);
    Object.assign(asked, {page: 0}, change);
    return load().catch(api.fail);
  }
  function later(change) {
    clearTimeout(timer);
    Object.assign(asked, {page: 0}, change);
    timer = setTimeout(() => ask({}), 300);
  }

  async function load() {
    const turn = ++asking;
    const answer = await api.ask("samples", {...asked, runs: [...api.chosen].reverse()}); // without a run the newest
    if (turn !== asking) return; // a later request has been sent
    paints.length = 0;
    body.replaceChildren(...answer.views.map((view) => shown(view, answer.hint)));
    if (!answer.views.length) body.append(el("p", {}, "No run has samples yet. ", el("span", {class: "dim"}, answer.hint)));
    if (!api.report) controls(answer);
    choices();
    paint();
  }

  function controls({runs, views: [view]}) {
    fill(run, runs.map((name) => [name, name]), view?.run);
    const steps = [...new Set([...(view?.recorded ?? []), ...(view?.steps ?? [])])].sort((a, b) => b - a);
    fill(step, [["table", "all rows"], ...steps.map((n) => [String(n), view.recorded.includes(n) ? `${n}, with tokens` : n])], view?.step);
    back.disabled = asked.page === 0;
    next.disabled = !view?.more;
  }

  function fill(select, options, value) {
    select.replaceChildren(...options.map(([name, label]) => el("option", {value: name}, String(label))));
    if (value !== undefined) select.value = value;
  }

  // Offer the numbers that exist; keep the choice.
  function choices() {
    const present = Object.keys(NAMES).filter((name) => paints.some(({numbers}) => name in numbers));
    const before = colour.value;
    fill(colour, [...present.map((name) => [name, NAMES[name]]), ["", "none"]], present.includes(before) ? before : (present[0] ?? ""));
    colouring.hidden = !present.length;
  }

  function paint() {
    const values = paints.flatMap(({numbers}) => numbers[colour.value] ?? []).map((value) => Math.abs(value ?? 0));
    const most = values.reduce((a, b) => Math.max(a, b), 0);
    for (const one of paints) one.paint(colour.value, most);
  }

  function shown(view, hint) {
    const head = el("h2", {}, view.groups.length ? `${view.run}, step ${view.step}` : view.run);
    if (view.groups.length) return el("div", {}, head, view.groups.map((group) => groupOf(view, group)));
    const none = view.rows.length ? null : el("p", {}, "No sample matches.");
    const note = view.recorded.length ? null : el("p", {class: "dim"}, `No numbers of tokens: ${hint}.`);
    const damage = view.damage ? el("p", {class: "problem"}, view.damage) : null;
    return el("div", {}, head, damage, note, none, view.rows.map(row));
  }

  function groupOf(view, group) {
    return el("section", {class: "group", "aria-label": `prompt ${group.id}`},
      el("details", {open: true}, el("summary", {}, `prompt ${group.id}, ${group.samples.length} samples`), el("pre", {class: "prompt"}, group.prompt)),
      el("div", {class: "samples"}, group.samples.map((sample) => sampleOf(view, sample))));
  }

  function sampleOf(view, sample) {
    const made = el("div", {});
    const show = (numbered) => {
      const one = tokens(numbered, NAMES);
      paints.push(one);
      made.replaceChildren(one.element);
    };
    if (sample.tokens) show(sample.tokens);
    else {
      made.append(el("pre", {}, sample.response));
      if (!api.report) made.append(el("button", {type: "button", onclick: () => api.ask("sample_tokens", {run: view.run, step: Number(view.step), row: sample.row})
        .then((numbered) => { show(numbered); choices(); paint(); }).catch(api.fail)}, "show tokens"));
    }
    return el("article", {class: "sample"}, facts(sample.reward, sample), made);
  }

  function facts(reward, sample, extra = []) {
    const scores = Object.entries(sample.scores);
    const words = [`reward ${number(reward) || "none"}`, ...(scores.length > 1 ? scores.map(([name, value]) => `${name} ${number(value) || "none"}`) : []),
      ...extra, sample.end || (sample.finished ? "" : "cut by the limit"), sample.rejected ? "rejected" : sample.valid === false ? "invalid" : ""];
    return el("p", {class: "facts"}, words.filter(Boolean).join(", "));
  }

  function row(sample) {
    const turns = sample.turns.map((turn) => turnOf(turn.role, turn.text, noteOf(turn), "tokens" in turn, turn.typed, turn.end));
    const columns = Object.entries(sample.columns);
    return el("article", {class: "sample"},
      facts(sample.reward, sample, [`step ${sample.step}`, sample.advantage === null ? "" : `advantage ${number(sample.advantage)}`]),
      turnOf("prompt", sample.prompt, "", false), turns.length ? turns : turnOf("response", sample.response, "", true),
      columns.length ? el("details", {}, el("summary", {}, "columns of its row"), table(["column", "value"], columns.map(([name, value]) => [name, String(value ?? "")]))) : null);
  }

  function noteOf(turn) {
    const seconds = typeof turn.seconds === "number" ? `, ${duration(turn.seconds)}` : "";
    return "tokens" in turn ? `${turn.tokens} tokens in the loss` : `not in the loss${seconds}`;
  }

  // `typed`: what it types at a prompt, behind the prompt's sign; `end`: why a program ended.
  function turnOf(role, text, note, own, typed = [], end = "") {
    const lines = typed.map(([sign, line]) => el("pre", {class: "typed"}, el("span", {class: "sign"}, `${sign} `), line));
    const body = text || !(typed.length || end) ? el("pre", {}, String(text ?? "")) : null;
    return el("div", {class: own ? "turn own" : "turn"}, el("small", {}, `${role ?? ""} ${note}`), body, lines,
      end ? el("pre", {class: "problem"}, end) : null);
  }

  if (!api.report) addEventListener("hashchange", () => {
    const {tab, args} = api.place();
    if (tab === "samples" && args.has("run")) ask({run: args.get("run"), step: args.get("step") ?? ""});
  });
  if (api.report) await load();
  else element.addEventListener("shown", () => load().catch(api.fail)); // runs may have written more meanwhile
}
