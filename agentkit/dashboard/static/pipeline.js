// What the learner, the engines, the environments and the gate of a run did, and what they waited for.

import { Cards } from "./cards.js";
import { ask } from "./data.js";
import { badge, choice, count, duration, facts, field, grid, h, line, number, percent, plain } from "./dom.js";
import { change, go, link, route, shownRun } from "./state.js";
import { interval, loadTable } from "./table.js";

const STEPS_AT_FIRST = 12;
const MOST_LANES = 512;
const PIPELINE_TABS = [["", "Timeline"], ["gate", "Gate"], ["roles", "Engines and roles"]];
const LEARNER = [["waiting", "waits for episodes"], ["training", "trains"], ["publishing", "publishes weights"], ["other", "evaluations, checkpoints"]];
const ACTIVITIES = [["generation", "generating", "generation"], ["environment", "environment", "environment"], ["waiting", "waiting", "waiting"]];
const PIPELINE_CHARTS = {
  "": [
    ["Seconds of a step", [["waits", "time/wait"], ["trains", "time/train"], ["publishes", "time/publish"]]],
    ["Episodes under way", [["generation", ":generating"], ["environment", ":environment"], ["waiting", ":waiting"]]],
    ["Complete groups that wait for the learner", [["groups", ":ready"]]],
    ["Seconds for which the groups of the batch waited", [["seconds", ":ready_s"]]],
  ],
  gate: [
    ["Staleness", [["mean", "staleness/mean"], ["largest", "staleness/max"]]],
    ["Groups in the gate after the step", [["running", "gate/running"], ["complete", "gate/ready"]]],
    ["Episodes without use", [["dropped", "gate/dropped"], ["cancelled", "gate/cancelled"], ["voided", "gate/voided"]]],
    ["Share of groups without signal", [["share", "rollout/zero_signal_share"]]],
  ],
  roles: [
    ["Tokens per second", "tokens_per_s"], ["Share of the time in which engines compute", "busy_share"],
    ["Share of prompt tokens from the prefix cache", "reused_share"], ["Requests at the end of the step", "in_flight"],
  ],
};

export class Pipeline {
  constructor(root) {
    this.root = root;
    this.bar = h("div", { class: "bar" });
    this.summary = h("section", { class: "panel" });
    this.tabs = h("nav", { class: "tabs", "aria-label": "Part" });
    this.body = h("section", { class: "body" });
    root.replaceChildren(this.bar, this.summary, this.tabs, this.body);
  }

  async show(runs) {
    const run = shownRun(runs);
    if (!run || run.status === "unreadable") {
      this.clear();
      this.run = null;
      this.root.replaceChildren(h("p", { class: run ? "empty wrong" : "empty" }, run ? line(run.error, 400) : "There are no runs yet."));
      return;
    }
    if (!this.bar.isConnected) this.root.replaceChildren(this.bar, this.summary, this.tabs, this.body);
    if (route().params.get("run") !== run.name) change({ run: run.name });
    const stamp = JSON.stringify([run.name, run.status, run.updated, run.counts]);
    if (stamp !== this.stamp) {
      const asked = { run: run.name };
      const [found, metrics, table] = await Promise.all([ask("pipeline", asked), ask("metrics", asked), loadTable(run.name)]);
      if (route().view !== "pipeline" || route().params.get("run") !== run.name) return;
      Object.assign(this, { stamp, found, metrics, table });
    }
    const tab = route().params.get("tab") ?? "";
    if (this.run?.name !== run.name || this.tab !== tab) this.clear();
    Object.assign(this, { runs, run, tab });
    this.draw();
  }

  draw() {
    this.drawBar();
    this.drawSummary();
    this.tabs.replaceChildren(...PIPELINE_TABS.map(([tab, text]) =>
      h("button", { "aria-current": tab === this.tab ? "page" : null, onclick: () => this.turnTo(tab) }, text)));
    if (!this.parts) {
      this.parts = h("div", { class: "parts" });
      this.cards = new Cards(this.charts().map(([title]) => title), (step) => { change({ step, tab: "" }); this.show(this.runs); });
      this.body.replaceChildren(this.parts, this.cards.element);
    }
    const drawn = { "": () => this.timeline(), gate: () => this.gate(), roles: () => this.roles() }[this.tab] ?? (() => this.timeline());
    const scrolled = this.parts.querySelector(".lanes")?.scrollTop ?? 0;
    this.parts.replaceChildren(...drawn());
    const lanes = this.parts.querySelector(".lanes");
    if (lanes) lanes.scrollTop = scrolled;
    this.drawCharts();
  }

  drawBar() {
    if (this.bar.contains(document.activeElement) && this.barOf === this.run.name) return;
    this.barOf = this.run.name;
    const readable = this.runs.filter((run) => run.status !== "unreadable");
    this.bar.replaceChildren(
      h("h1", null, "Pipeline"), badge(this.run.status), h("div", { class: "spring" }),
      choice("Run", this.run.name, readable.map((run) => [run.name, run.name]), (run) => go("pipeline", { run, tab: this.tab })),
      field("Steps", route().params.get("steps"), { class: "range", placeholder: "5 or 1..9", autocomplete: "off", "data-search": "" },
        (steps) => { change({ steps }); this.draw(); }));
  }

  drawSummary() {
    const { recent, verdict } = this.found;
    if (!recent.steps) {
      this.summary.replaceChildren(h("p", { class: "note" }, "This run has not finished a training step."));
      return;
    }
    const learner = LEARNER.map(([name, text]) => [name, text, recent.learner[name]]);
    const seconds = learner.reduce((sum, [, , value]) => sum + value, 0);
    const rows = [["Learner", learner.map(([name, text, value]) => [name, `${text} ${percent(value / seconds, 0)}`, value])]];
    if (recent.episodes) rows.push(["Episodes", ACTIVITIES.map(([kind, name, text]) => [kind, `${text} ${number(Math.round(100 * recent.episodes[name]) / 100)}`, recent.episodes[name]])]);
    if (recent.engines !== null) {
      rows.push(["Engines", [["generation", `compute ${percent(recent.engines, 0)}`, recent.engines], ["waiting", `idle ${percent(1 - recent.engines, 0)}`, Math.max(0, 1 - recent.engines)]]]);
    }
    this.summary.replaceChildren(
      h("p", { class: "note verdict" }, verdict, ` (Last ${count(recent.steps)} steps.)`),
      ...rows.map(([name, parts]) => h("div", { class: "sharerow" }, h("strong", null, name),
        h("div", null,
          h("div", { class: "shares" }, parts.map(([kind, text, value]) => h("div", { class: kind, title: text, style: { "flex-grow": String(1e6 * value) } }))),
          h("div", { class: "legend" }, parts.map(([kind, text]) => h("span", null, h("i", { class: `dot ${kind}` }), text)))))));
  }

  // --- timeline

  /** Row numbers of the steps in the window. */
  window() {
    const { step } = this.found.steps;
    const range = interval(route().params.get("steps"));
    const rows = step.map((_, row) => row);
    const inside = range ? rows.filter((row) => step[row] >= range[0] && step[row] <= range[1]) : rows.slice(-STEPS_AT_FIRST);
    return inside.length ? inside : rows.slice(-STEPS_AT_FIRST);
  }

  selected() {
    const rows = this.window();
    const wanted = Number(route().params.get("step"));
    return rows.find((row) => this.found.steps.step[row] === wanted) ?? rows.at(-1);
  }

  timeline() {
    const { steps, events } = this.found;
    const rows = this.window();
    if (!rows.length) return [h("p", { class: "empty" }, "The timeline begins with the first training step.")];
    const [from, to] = [steps.began[rows[0]], steps.ended[rows.at(-1)]];
    const at = (time) => 100 * (time - from) / Math.max(to - from, 1e-9);
    const piece = (kind, begin, end, properties, ...children) => h("a", {
      class: `piece ${kind}`, style: { left: `${at(begin)}%`, width: `${Math.max(0, at(end) - at(begin))}%` }, ...properties }, ...children);
    const chosen = this.selected();
    const stepLink = (row) => link("pipeline", { ...Object.fromEntries(route().params), step: steps.step[row] });
    const learner = rows.flatMap((row) => [["waiting", "began", "got"], ["training", "got", "trained"], ["publishing", "trained", "ended"]].map(([kind, begin, end]) => piece(
      kind, steps[begin][row], steps[end][row],
      { href: stepLink(row), title: `step ${steps.step[row]}: ${LEARNER.find(([name]) => name === kind)[1]} ${duration(steps[end][row] - steps[begin][row])}` })));
    const numbers = rows.map((row) => piece(row === chosen ? "number here" : "number", steps.began[row], steps.ended[row], { href: stepLink(row) }, String(steps.step[row])));
    const bars = (parts, most, title) => rows.map((row) => piece("stack", steps.began[row], steps.ended[row], { href: stepLink(row), title: title(row) },
      parts(row).map(([kind, value]) => h("i", { class: kind, style: { height: `${100 * (value ?? 0) / Math.max(most, 1e-9)}%` } }))));
    const busy = new Map(this.metrics.steps.map((step, row) => [step, this.metrics.values["engine/busy_share"]?.[row] ?? null]));
    const under = (row) => ACTIVITIES.reduce((sum, [, name]) => sum + (steps[name][row] ?? 0), 0);
    const [mostUnder, mostReady] = [Math.max(...rows.map(under)), Math.max(...rows.map((row) => steps.ready[row] ?? 0))];
    const inside = events.filter((event) => event.time >= from && event.time <= to);
    const lane = (name, note, pieces) => h("div", { class: "lane" }, h("div", { class: "name" }, name, h("small", null, note)), h("div", { class: "track" }, pieces));
    return [
      h("div", { class: "timeline panel" },
        lane("Step", `${duration(to - from)} in all`, numbers),
        lane("Learner", "", learner),
        lane("Engines", "share of the step in which they compute", bars((row) => [["generation", busy.get(steps.step[row])]], 1, (row) => `step ${steps.step[row]}: computing ${percent(busy.get(steps.step[row]), 0)}`)),
        mostUnder ? lane("Episodes", `mean number, at most ${number(mostUnder)}`, bars((row) => ACTIVITIES.map(([kind, name]) => [kind, steps[name][row]]).reverse(), mostUnder,
          (row) => `step ${steps.step[row]}: ${ACTIVITIES.map(([, name, text]) => `${text} ${number(steps[name][row])}`).join(", ")}`)) : null,
        mostReady ? lane("Complete groups", `that wait for the learner, at most ${number(mostReady)}`, bars((row) => [["ready", steps.ready[row]]], mostReady,
          (row) => `step ${steps.step[row]}: ${number(steps.ready[row])} groups`)) : null,
        inside.length ? lane("Events", "", inside.map((event) => h("i", { class: `mark ${event.event}`, style: { left: `${at(event.time)}%` }, title: plain(event.text) }))) : null,
        h("div", { class: "legend" }, [["waiting", "waiting"], ["training", "training"], ["publishing", "publishing"], ["other", "evaluation, checkpoint"], ["generation", "generation"], ["environment", "environment"], ["ready", "complete groups"]].map(([kind, text]) =>
          h("span", null, h("i", { class: `dot ${kind}` }), text)))),
      ...this.lanes(chosen),
    ];
  }

  /** The episodes of one step, a line for each. */
  lanes(row) {
    const { steps } = this.found;
    const { columns } = this.table;
    const step = steps.step[row];
    const known = columns.id.map((_, index) => index).filter((index) => columns.step[index] === step && columns.ending[index] !== "eval");
    const rows = known.filter((index) => columns.ended_at[index] !== null && columns.duration_s[index] !== null)
      .sort((a, b) => columns.group_id[a] - columns.group_id[b] || columns.member[a] - columns.member[b] || a - b);
    const title = h("div", { class: "bar" }, h("h2", null, `Episodes of step ${step}`),
      h("a", { href: link("episodes", { run: this.run.name, step }) }, `${count(known.length)} in the table`));
    if (!rows.length) return [title, h("p", { class: "note" }, known.length ? "This run has not recorded when its episodes ended." : "No episode was recorded in this step.")];
    const shown = rows.slice(0, MOST_LANES);
    const start = (index) => columns.ended_at[index] - columns.duration_s[index];
    const from = Math.min(steps.began[row], ...shown.map(start));
    const to = Math.max(steps.ended[row], ...shown.map((index) => columns.ended_at[index]));
    const at = (time) => `${100 * (time - from) / Math.max(to - from, 1e-9)}%`;
    const wide = (seconds) => `${100 * seconds / Math.max(to - from, 1e-9)}%`;
    const bar = (index, place) => {
      const [all, generation, environment] = ["duration_s", "generate_s", "env_s"].map((name) => columns[name][index] ?? 0);
      const rest = Math.max(0, all - generation - environment);
      const wait = columns.ending[index] === "trained" ? Math.max(0, steps.got[row] - columns.ended_at[index]) : 0;
      const first = place === 0 || columns.group_id[shown[place - 1]] !== columns.group_id[index];
      const text = `episode ${columns.id[index]}, group ${columns.group_id[index]}, ${columns.ending[index]}: generation ${duration(generation)}, ` +
        `environment ${duration(environment)}, waiting ${duration(rest)}${wait ? `, then ${duration(wait)} until its step` : ""}`;
      return h("a", { class: first ? "run first" : "run", href: link("episode", { run: this.run.name, id: columns.id[index] }), title: plain(text), "aria-label": plain(text) },
        h("span", { class: `line ${columns.ending[index].replace(/[^a-z]/g, "")}`, style: { left: at(start(index)), width: wide(all) } },
          [["generation", generation], ["environment", environment], ["waiting", rest]].map(([kind, value]) => h("i", { class: kind, style: { "flex-grow": String(1e6 * value) } }))),
        wait ? h("span", { class: "until", style: { left: at(columns.ended_at[index]), width: wide(wait) } }) : null);
    };
    const moment = (name, time) => h("div", { class: "moment", style: { left: at(time) }, title: name });
    return [title,
      h("p", { class: "note" }, `One line for each episode, by group. The parts of a line are shares of its time, in no order; the thin part is the time until the learner took it. ${duration(to - from)} in all.`,
        rows.length > shown.length ? ` The first ${count(shown.length)} are shown.` : ""),
      h("div", { class: "lanes panel" }, shown.map(bar), moment("the learner begins to wait", steps.began[row]), moment("the learner begins to train", steps.got[row]))];
  }

  // --- gate

  gate() {
    const { gate, staleness, endings, groups, events } = this.found;
    const silent = events.filter((event) => event.event === "no_signal").reverse();
    const run = this.run.name;
    const all = endings.reduce((sum, one) => sum + one.episodes, 0);
    const largest = Math.max(...staleness, 1e-9);
    return [
      h("div", { class: "panel" }, facts([
        ["Policy", setting(gate.policy)], ["Async ratio", setting(gate.async_ratio)],
        ["Groups of a batch", setting(gate.batch)], ["Redundant groups", setting(gate.extra)], ["Largest staleness", number(gate.max_staleness)],
        ["Groups under way at most", number(gate.capacity)],
        gate.step === null ? null : [`Groups after step ${gate.step}`, gate.running === null ? "not recorded" : `${count(gate.running)} running, ${count(gate.ready)} complete`]])),
      h("h2", null, "Staleness of the groups that were trained on"),
      staleness.length ? grid(["Versions", "Share", ""], staleness.map((share, age) => [[String(age), "num"], [percent(share), "num"],
        [h("div", { class: "interval" }, h("div", { class: "range ready", style: { left: 0, width: `${100 * share / largest}%` } })), "wide"]])) : h("p", { class: "note" }, "No group was trained on yet."),
      h("h2", null, "Endings of episodes"),
      endings.length ? grid(["Ending", "Reason", "Episodes", "Share", "Tokens of answers", "Time"], endings.map((one) => [
        [badge(one.ending)], [one.reason ? line(one.reason, 100) : ""],
        [h("a", { href: link("episodes", { run, ending: one.ending, error: one.reason }) }, count(one.episodes)), "num"],
        [percent(one.episodes / all), "num"], [number(one.tokens), "num"], [duration(one.seconds), "num"]])) : h("p", { class: "note" }, "No episode was recorded yet."),
      h("h2", null, "Groups with equal returns"),
      h("p", { class: "note" }, `${count(groups.equal)} of ${count(groups.groups)} groups: in ${count(groups.solved)} every episode succeeded, in ${count(groups.unsolved)} none. Advantages that compare the members of a group have no signal from them.`),
      groups.latest.length ? grid(["Step", "Group", "Use", "Return", "Succeeded"], groups.latest.map((one) => [
        [count(one.step), "num"], [h("a", { href: link("episodes", { run, group_id: one.group_id }) }, String(one.group_id)), "num"], [badge(one.ending)],
        [number(one.return), "num"], [`${one.solved} of ${one.episodes}`, "num"]])) : null,
      silent.length ? h("h2", null, "Steps without signal") : null,
      silent.length ? h("ul", { class: "silent" }, silent.map((event) => h("li", null, line(event.text, 300)))) : null,
    ].filter(Boolean);
  }

  // --- engines and roles

  roles() {
    const { engines, roles, nodes, events } = this.found;
    const clock = (time) => new Date(1000 * time).toLocaleString();
    return [
      h("h2", null, "Engines"),
      engines.length ? grid(["Engine", "State", "Tokens/s", "Computes", "Prefix reuse", "Requests", "Version", "Behind", "Restarts"], engines.map((one) => [
        [String(one.engine), "num"],
        [[badge(one.state, one.state === "serving" ? "finished" : "failed"), one.cause ? h("small", { title: plain(one.cause) }, line(one.cause, 120)) : null]],
        [number(one.tokens_per_s), "num"], [percent(one.busy_share), "num"], [percent(one.reused_share), "num"], [number(one.in_flight), "num"],
        [number(one.version), "num"], [number(one.behind), "num"], [number(one.restarts), "num"]])) : h("p", { class: "note" }, "Known after the first step."),
      h("h2", null, "Roles"),
      roles.length ? grid(["Role", "Number", "Host", "Process", "Since", "Starts"], roles.map((one) => [
        [line(one.role)], [setting(one.index), "num"], [line(one.host)], [setting(one.pid), "num"], [clock(one.since)], [String(one.placed), "num"]]))
        : h("p", { class: "note" }, "This run has not recorded where its roles run."),
      nodes.length ? h("h2", null, "Nodes") : null,
      nodes.length ? grid(["Host", "Roles", "Sandboxes"], nodes.map((one) => [
        [line(one.host)], [line(Object.entries(one.roles).map(([role, many]) => `${role} × ${many}`).join(", "))], [count(one.sandboxes), "num"]])) : null,
      h("h2", null, "Events"),
      events.length ? grid(["Time", "Event"], [...events].reverse().map((one) => [[clock(one.time)], [line(one.text, 300), "free"]])) : h("p", { class: "note" }, "No event."),
    ].filter(Boolean);
  }

  // --- charts

  chartLines(what) {
    const { values, steps } = this.metrics;
    const column = (name) => {
      if (!name.startsWith(":")) return values[name];
      const own = new Map(this.found.steps.step.map((step, row) => [step, this.found.steps[name.slice(1)][row]]));
      return steps.map((step) => own.get(step) ?? null);
    };
    if (typeof what !== "string") return what.map(([label, name]) => [label, column(name)]);
    const engines = Object.keys(values).map((name) => /^engine\/(\d+)\/(\w+)$/.exec(name)).filter((match) => match?.[2] === what);
    const lines = engines.map((match) => [`engine ${match[1]}`, values[match[0]]]);
    return lines.length ? lines : [["engine", values[`engine/${what}`]]];
  }

  charts() {
    return PIPELINE_CHARTS[this.tab] ?? PIPELINE_CHARTS[""];
  }

  drawCharts() {
    for (const [title, what] of this.charts()) this.cards.draw(title, this.run.name, this.metrics.steps, this.chartLines(what));
  }

  // --- the page

  turnTo(tab) {
    change({ tab });
    this.show(this.runs);
  }

  move(by) {
    if (!this.found) return;
    const { step } = this.found.steps;
    const row = Math.max(0, Math.min(step.length - 1, (this.selected() ?? 0) + by));
    if (!step.length) return;
    const rows = this.window();
    const outside = row < rows[0] || row > rows.at(-1);
    change({ step: step[row], ...(outside ? { steps: `${step[row < rows[0] ? row : row - rows.length + 1]}..${step[row < rows[0] ? row + rows.length - 1 : row]}` } : {}) });
    this.barOf = null;
    this.draw();
  }

  keys() {
    return {
      ArrowLeft: () => this.move(-1), ArrowRight: () => this.move(1), j: () => this.move(1), k: () => this.move(-1),
      Enter: () => this.found?.steps.step.length && go("episodes", { run: this.run.name, step: this.found.steps.step[this.selected()] }),
      1: () => this.turnTo(""), 2: () => this.turnTo("gate"), 3: () => this.turnTo("roles"),
    };
  }

  recolour() {
    this.cards?.recolour();
    if (this.parts) this.drawCharts();
  }

  clear() {
    this.cards?.destroy();
    this.cards = this.parts = null;
    this.body.replaceChildren();
  }

  destroy() {
    this.clear();
  }
}

/** A setting of a run, which may have been written by another version. */
function setting(value) {
  return value === null ? "–" : line(String(value));
}
