// A form of every key, and its results: the command, its errors, the YAML, the plan, and a start.

import { el } from "board/dom.js";

const WAIT_MS = 300; // after the last keystroke
const MATCHES = 60; // keys that a search shows

export async function mount(element, api) {
  const form = await api.ask("form");
  const wish = {groups: {stage: "grpo"}, values: {}, command: "launch", ranks: 1, site: "", nodes: 1, ranks_per_node: 0,
    gpus: 8, gpus_per_node: 8, device: "h100"};
  let answer = {base: {}, unread: [], error: null}, timer = 0, asking = 0;
  const rows = new Map(); // key -> its row that is shown
  const open = new Set(); // sections

  // --- choices by name

  const choose = (name, options, value, change) => labelled(name, el("select", {onchange: (event) => change(event.target.value)},
    options.map(([key, label]) => el("option", {value: key, selected: key === value}, label))));
  const count = (name, key, low = 1) => labelled(name, el("input", {type: "number", min: low, value: wish[key], size: 4,
    oninput: (event) => event.target.value !== "" && set({[key]: Math.trunc(Number(event.target.value))})}));
  const groups = Object.entries(form.groups).filter(([, options]) => options.length > 1).map(([group, options]) =>
    choose(group, [["", "default"], ...options.map((name) => [name, name])], wish.groups[group] ?? "", (value) => {
      if (value) wish.groups[group] = value;
      else delete wish.groups[group];
      check();
    }));
  const here = el("span", {class: "fields"}, count("ranks", "ranks"));
  const slurm = el("span", {class: "fields", hidden: true},
    choose("site", [["", "default"], ...form.sites.map((name) => [name, name])], "", (site) => set({site})),
    count("nodes", "nodes"), count("ranks per node (0: the site's)", "ranks_per_node", 0));
  const where = choose("run it", [["launch", "on this machine"], ["submit", "by Slurm"]], "launch", (command) => {
    here.hidden = command !== "launch";
    slurm.hidden = !here.hidden;
    dry.replaceChildren();
    set({command});
  });

  // --- results

  const status = el("p", {role: "status"});
  const command = el("pre", {class: "command", tabindex: 0, "aria-label": "command"});
  const yaml = el("pre", {tabindex: 0, "aria-label": "YAML"});
  const planned = el("pre", {class: "plan scroll", tabindex: 0, "aria-label": "plan"});
  const refused = el("p", {class: "problem"});
  const start = el("button", {type: "button", onclick: () => act("start").then(running)}, "start here");
  const look = el("button", {type: "button", hidden: true, onclick: dryRun}, "dry run");
  const dry = el("div", {});
  const jobs = el("div", {});
  const side = el("div", {class: "side"}, el("div", {class: "controls"}, where, here, slurm), status,
    command, el("div", {class: "controls"}, copy("command", command), start, look), dry,
    el("details", {}, el("summary", {}, "YAML"), copy("YAML", yaml), yaml),
    el("h2", {}, "plan"), el("div", {class: "controls"}, count("GPUs", "gpus"), count("a node", "gpus_per_node"),
      choose("device", form.devices.map((name) => [name, name]), wish.device, (device) => set({device}))), planned, refused,
    el("h2", {}, "on this machine"), jobs);

  // --- the keys

  const search = el("input", {type: "search", oninput: render, placeholder: "name or meaning"});
  const all = el("input", {type: "checkbox", onchange: render});
  const list = el("div", {});
  element.append(el("div", {class: "controls"}, groups), el("div", {class: "compose"},
    el("div", {class: "keys"}, el("div", {class: "controls"}, labelled("find a key", search), labelled("show keys that this stage does not read", all)), list), side));

  function labelled(name, input) {
    return el("label", {}, name, input);
  }

  function set(change) {
    Object.assign(wish, change);
    later();
  }

  function later() {
    clearTimeout(timer);
    timer = setTimeout(check, WAIT_MS);
  }

  async function check() {
    clearTimeout(timer);
    const turn = ++asking;
    try {
      const checked = await api.ask("check", wish);
      if (turn !== asking) return; // something has changed since
      const other = JSON.stringify([checked.base, checked.unread]) !== JSON.stringify([answer.base, answer.unread]);
      const whole = Object.keys(checked.base).length > 0 && checked.yaml !== "";
      answer = whole ? checked : {...checked, base: {...answer.base, ...checked.base}, unread: answer.unread};
      if (other && whole) render();
      tell();
    } catch (error) {
      api.fail(error);
    }
  }

  function tell() {
    const {error, plan} = answer;
    status.className = error ? "problem" : "good";
    status.replaceChildren(error ? error.text : "no errors");
    if (error && form.keys.some((key) => key.name === error.key) && !rows.has(error.key))
      status.append(" ", el("button", {type: "button", onclick: () => reveal(error.key)}, "show the key"));
    command.textContent = answer.command;
    yaml.textContent = answer.yaml;
    planned.textContent = plan.table;
    planned.hidden = !plan.table;
    refused.textContent = plan.error;
    start.disabled = look.disabled = Boolean(error);
    start.hidden = wish.command !== "launch";
    look.hidden = !start.hidden;
    for (const [name, row] of rows) row.tell(error?.key === name ? error.text : "");
  }

  function render() {
    rows.clear();
    const text = search.value.trim().toLowerCase();
    const shown = form.keys.filter((key) => all.checked || key.name in wish.values || !answer.unread.includes(key.name));
    if (text) {
      const matches = shown.filter((key) => `${key.name} ${key.meaning}`.toLowerCase().includes(text));
      list.replaceChildren(...matches.slice(0, MATCHES).map(rowOf));
      if (!matches.length) list.append("no such key");
      if (matches.length > MATCHES) list.append(`and ${matches.length - MATCHES} more`);
    } else {
      const sections = Map.groupBy(shown, (key) => (key.name.includes(".") ? key.name.split(".")[0] : "at the top"));
      list.replaceChildren(...[...sections].map(([name, keys]) => section(name, keys)));
    }
    for (const [name, row] of rows) row.tell(answer.error?.key === name ? answer.error.text : "");
  }

  function section(name, keys) {
    const changed = keys.filter((key) => key.name in wish.values).length;
    const body = el("div", {});
    const fill = () => !body.childElementCount && body.append(...keys.map(rowOf));
    if (open.has(name)) fill();
    return el("details", {open: open.has(name), "data-section": name, ontoggle: (event) => {
      if (event.target.open) open.add(name);
      else open.delete(name);
      if (event.target.open) fill();
    }}, el("summary", {}, `${name} (${keys.length}${changed ? `, ${changed} set` : ""})`), body);
  }

  function rowOf(key) {
    const id = `key-${key.name}`, element_of_list = key.name.includes("[]");
    const before = answer.base[key.name] ?? key.default;
    const problem = el("p", {class: "problem", id: `${id}-problem`, hidden: true});
    const reset = el("button", {type: "button", "aria-label": `${key.name} as before`, onclick: () => {
      delete wish.values[key.name];
      input.value = before;
      check();
    }}, "\u21ba");
    const change = (event) => {
      if (event.target.value === before) delete wish.values[key.name];
      else wish.values[key.name] = event.target.value;
      mark();
      later();
    };
    const options = key.kind === "true, false" ? ["true", "false"] : key.kind === "text" ? key.choices : [];
    const value = wish.values[key.name] ?? before;
    const input = options.length
      ? el("select", {id, onchange: change}, [...new Set([...options, value])].map((name) => el("option", {value: name, selected: name === value}, name)))
      : el("input", {id, oninput: change, spellcheck: "false", autocomplete: "off", inputmode: ["integer", "number"].includes(key.kind) ? "decimal" : "text"});
    input.value = value;
    input.setAttribute("aria-describedby", `${id}-meaning ${id}-problem`);
    const mark = () => {
      reset.hidden = !(key.name in wish.values);
      made.classList.toggle("set", !reset.hidden);
    };
    const meaning = key.choices.length && key.kind !== "text" ? `${key.meaning} (${key.choices.join(", ")})` : key.meaning;
    const made = el("div", {class: "key"}, el("label", {for: id}, key.name), element_of_list ? el("span", {class: "dim"}, "in an element of the list") : [input, reset],
      el("small", {id: `${id}-meaning`, class: "dim"}, `${meaning} [${key.kind}${key.range && ` ${key.range}`}${key.default ? `, ${key.default}` : ""}]`), problem);
    mark();
    if (!element_of_list) rows.set(key.name, {input, tell: (text) => {
      problem.textContent = text;
      problem.hidden = !text;
      input.setAttribute("aria-invalid", String(Boolean(text)));
    }});
    return made;
  }

  function reveal(name) {
    search.value = name;
    if (answer.unread.includes(name)) all.checked = true;
    render();
    tell();
    rows.get(name)?.input.focus();
    rows.get(name)?.input.select?.(); // typing replaces it
  }

  // --- starting and stopping

  function copy(name, from) {
    return el("button", {type: "button", onclick: async (event) => {
      try {
        await navigator.clipboard.writeText(from.textContent);
        event.target.textContent = "copied";
        setTimeout(() => (event.target.textContent = `copy ${name}`), 1500);
      } catch {
        getSelection().selectAllChildren(from); // not allowed: ready for Ctrl-C
      }
    }}, `copy ${name}`);
  }

  async function act(name, args = wish) {
    try {
      return await api.ask(name, args);
    } catch (error) {
      api.fail(error);
      return null;
    }
  }

  async function dryRun() {
    dry.replaceChildren(el("p", {class: "dim"}, "asking ..."));
    const reply = await act("dry_run");
    dry.replaceChildren();
    if (!reply) return;
    const submit = el("button", {type: "button", onclick: async () => {
      submit.disabled = true;
      const submitted = await act("submit", {key: reply.key});
      if (submitted) dry.append(el("pre", {role: "status"}, submitted.text));
    }}, "submit this");
    dry.append(el("h2", {}, "what would be submitted"), el("pre", {tabindex: 0, "aria-label": "dry run"}, reply.text), submit);
  }

  function jobOf(job) {
    const runs = job.pid !== null;
    const how = runs ? `process ${job.pid}` : `ended with exit code ${job.code}`;
    const stop = el("button", {type: "button", disabled: !runs, onclick: () => act("stop", {folder: job.folder}).then(running)}, "stop");
    const log = el("details", {"data-log": job.folder, open: jobs.querySelector(`[data-log="${CSS.escape(job.folder)}"]`)?.open ?? false},
      el("summary", {}, "log"), el("pre", {}, job.log));
    return el("div", {class: "job"}, el("p", {}, `${job.folder}: ${how} `, stop), job.log ? log : null);
  }

  const running = api.every(3, element, async () => {
    const current = await api.ask("jobs");
    jobs.replaceChildren(...current.jobs.map(jobOf));
    if (!current.jobs.length) jobs.append(el("p", {class: "dim"}, "No run is running."));
  });
  await check();
}
