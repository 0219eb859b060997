// The sandboxes of a run or of a sandbox server: hosts, states, failures, and the episodes that they served.

import { Cards } from "./cards.js";
import { ask } from "./data.js";
import { badge, choice, count, duration, facts, field, grid, h, line, number, percent, plain, short } from "./dom.js";
import { change, go, link, route, shownRun } from "./state.js";

const SANDBOX_TABS = [["", "Sandboxes"], ["history", "History"], ["curves", "Curves"]];
const FAILURES = [["", "all"], ["memory", "memory limit"], ["timeout", "timeout"], ["taint", "taint"], ["kill", "killed or ended"], ["host", "host or server"], ["other", "other"]];
const SANDBOX_CHARTS = [
  ["Sandboxes by state", ["busy", "idle", "running", "creating", "degraded", "paused", "exited"]],
  ["Reserves", ["spares", "standbys"]],
  ["Created and removed", ["created", "removed", "create_failures"]],
  ["Failures in sandboxes", ["oom", "timeout", "taint", "died"]],
  ["Recoveries", ["recoveries"]],
  ["Seconds of a recovery", ["recovery_s_p50", "recovery_s_max"]],
  ["Hedged calls", ["hedges", "hedges_won"]],
];
const HOST_CHARTS = [["Sandboxes by host", "sandboxes"], ["Processors in use by host", "cpu"], ["Memory in use by host", "memory"]];

export class Sandboxes {
  constructor(root) {
    this.root = root;
    this.bar = h("div", { class: "bar" });
    this.summary = h("section", { class: "panel" });
    this.tabs = h("nav", { class: "tabs", "aria-label": "Part" });
    this.body = h("section", { class: "body parts" });
    this.cursor = -1;
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
      const [found, metrics] = await Promise.all([ask("sandboxes", asked), ask("metrics", asked)]);
      if (route().view !== "sandboxes" || route().params.get("run") !== run.name) return;
      Object.assign(this, { stamp, found, metrics });
    }
    const tab = route().params.get("tab") ?? "";
    if (this.run?.name !== run.name || this.tab !== tab) this.clear();
    Object.assign(this, { runs, run, tab });
    this.draw();
  }

  draw() {
    this.drawBar();
    this.drawSummary();
    this.tabs.replaceChildren(...SANDBOX_TABS.map(([tab, text]) =>
      h("button", { "aria-current": tab === this.tab ? "page" : null, onclick: () => this.turnTo(tab) }, text)));
    if (this.tab === "curves") {
      this.drawCurves();
      return;
    }
    const scrolled = this.body.querySelector(".rows")?.scrollTop ?? 0;
    this.body.replaceChildren(...(this.tab === "history" ? this.drawHistory() : this.drawBoxes()).filter(Boolean));
    const rows = this.body.querySelector(".rows");
    if (rows) rows.scrollTop = scrolled;
  }

  drawBar() {
    if (this.bar.contains(document.activeElement) && this.barOf === this.run.name) return;
    this.barOf = this.run.name;
    const { params } = route();
    const set = (values) => { change(values); this.draw(); };
    this.bar.replaceChildren(
      h("h1", null, "Sandboxes"), badge(this.run.status), h("div", { class: "spring" }),
      choice("Run", this.run.name, this.runs.filter((run) => run.status !== "unreadable").map((run) => [run.name, run.name]), (run) => go("sandboxes", { run, tab: this.tab })),
      choice("Failure", params.get("kind") ?? "", FAILURES, (kind) => set({ kind })),
      field("Find", params.get("q"), { type: "search", class: "search", placeholder: "sandbox, host, cause", "data-search": "" }, (q) => set({ q })));
  }

  drawSummary() {
    const { state, totals } = this.found;
    if (this.found.server) {
      this.drawServer(state, totals);
      return;
    }
    const parts = (numbers) => Object.entries(numbers).map(([name, value]) => `${name} ${count(value)}`).join(", ");
    if (!state) {
      this.summary.replaceChildren(h("p", { class: "note" }, "This run has had no sandbox, or has not finished a training step."));
      return;
    }
    const after = (value, numbers) => [number(value), parts(numbers) ? h("small", null, " ", line(parts(numbers), 300)) : null].filter(Boolean);
    this.summary.replaceChildren(facts([
      [`After step ${state.step}`, `${count(state.busy)} busy, ${count(state.idle)} idle, ${count(state.creating)} being created, ${count(state.degraded)} set aside`],
      ["Spares", count(state.spares)], ["Standbys", count(state.standbys)],
      state.breakers_open ? ["Pools that create nothing", h("span", { class: "wrong" }, count(state.breakers_open))] : null,
      ["Created", count(totals.created)],
      totals.create_failures ? ["Not created", h("span", { class: "wrong" }, count(totals.create_failures))] : null,
      ["Removed", after(totals.removed, totals.removed_by)],
      ["Recovered environments", after(totals.recoveries, totals.recoveries_after)],
      totals.recoveries ? ["By", line(parts(totals.recovered_by))] : null,
      totals.recoveries ? ["Lost to recoveries", `${duration(totals.lost_s)}, the longest ${duration(totals.longest_s)}`] : null,
      ["Hedged calls", `${count(totals.hedges)}, ${count(totals.hedges_won)} won by the second attempt`],
    ]));
  }

  drawServer({ time, states }, totals) {
    const failures = ["oom", "timeout", "taint", "died"].filter((name) => totals[name]).map((name) => `${name} ${count(totals[name])}`).join(", ");
    const numbers = Object.entries(states).map(([state, many]) => `${count(many)} ${state}`).join(", ");
    this.summary.replaceChildren(facts([
      ["Server", line(this.run.server, 200)],
      ["Sandboxes", numbers || "none"], ["Seen", clock(time)],
      ["Created", count(totals.created)],
      totals.create_failures ? ["Not created", h("span", { class: "wrong" }, count(totals.create_failures))] : null,
      ["Removed", count(totals.removed)],
      ["Restarted after a loss", count(totals.recoveries)],
      failures ? ["In sandboxes", failures] : null,
    ]), h("p", { class: "note" }, "Clients decide which sandboxes are spares and standbys, and replace those that fail: their runs record it."));
  }

  /** Whether a row meets the conditions of the address. */
  meets(row, ...texts) {
    const { params } = route();
    const [kind, wanted] = [params.get("kind"), params.get("q")?.toLowerCase()];
    return (!kind || row.kind === kind) && (!wanted || texts.some((text) => text.toLowerCase().includes(wanted)));
  }

  boxLink(sandbox) {
    return link("sandboxes", { ...Object.fromEntries(route().params), tab: null, run: this.run.name, box: sandbox });
  }

  drawBoxes() {
    const { hosts, boxes, number: all } = this.found;
    const state = (host) => badge(host.state, host.state === "up" ? "finished" : host.state === "down" ? "failed" : "stopped");
    const kinds = (host) => Object.entries(host.kinds).map(([kind, many]) => `${kind} ${many}`).join(", ");
    const { server } = this.found;
    const hostTable = grid(["Host", "State", "Since", "Sandboxes", "CPU", "Memory", server ? "" : "Served episodes", "Failed", "By kind", "Recovered"], hosts.map((one) => [
      [line(one.host)], [[state(one), one.reason ? h("small", null, line(one.reason, 100)) : null].filter(Boolean)], [clock(one.since)], [count(one.sandboxes), "num"],
      [percent(one.cpu, 0), "num"], [percent(one.memory, 0), "num"], [server ? "" : count(one.served), "num"], [count(one.failed), "num"], [line(kinds(one))], [count(one.recovered), "num"]]));
    this.shown = boxes.filter((box) => this.meets(box, box.sandbox, box.host, box.cause));
    this.cursor = Math.min(this.cursor, this.shown.length - 1);
    const chosen = boxes.find((box) => box.sandbox === route().params.get("box"));
    const table = server ? this.serverTable() : grid(["Sandbox", "Host", "State", "Cause", "Episodes", "From", "To", "Recovered", "Longest"], this.shown.map((box) => [
      [h("a", { href: this.boxLink(box.sandbox) }, line(box.sandbox, 60))], [line(box.host, 40)], [badge(box.state)],
      [[line(box.cause, 60), box.in_use === false ? h("small", null, "while idle") : null].filter(Boolean)],
      [count(box.number), "num"], [clock(box.first)], [clock(box.failed_at ?? box.last)], [count(box.recovered), "num"], [duration(box.recovery_s), "num"]]));
    table.classList.add("rows");
    table.querySelectorAll("tbody tr").forEach((row, place) => {
      row.classList.toggle("cursor", place === this.cursor);
      row.classList.toggle("on", this.shown[place] === chosen);
    });
    return [
      hosts.length ? h("h2", null, "Hosts") : null, hosts.length ? hostTable : null,
      chosen ? this.drawBox(chosen) : null,
      h("h2", null, `Sandboxes (${count(this.shown.length)}${this.shown.length < all ? ` of ${count(all)}` : ""})`),
      this.shown.length ? table : h("p", { class: "note" }, all ? "No sandbox matches." : server ? "There is no sandbox, and none has failed." : "No sandbox has served a recorded episode, or failed."),
    ];
  }

  serverTable() {
    const bytes = (box) => (box.memory ? `${short(box.memory)}B${box.memory_limit ? ` of ${short(box.memory_limit)}B` : ""}` : "–");
    return grid(["Sandbox", "Tenant", "State", "Cause", "CPU", "Memory", "Processes", "Created", "Failed", "Restarts", "Longest"], this.shown.map((box) => [
      [h("a", { href: this.boxLink(box.sandbox) }, line(box.sandbox, 60))], [line(box.tenant ?? "", 40)], [badge(box.state)], [line(box.cause, 60)],
      [percent(box.cpu, 0), "num"], [bytes(box), "num"], [count(box.processes), "num"], [clock(box.first)], [clock(box.failed_at)],
      [count(box.recovered), "num"], [duration(box.recovery_s), "num"]]));
  }

  drawBox(box) {
    const { history } = this.found;
    const run = this.run.name;
    const means = Object.entries(box.recovered_by).map(([name, value]) => `${value} by ${name}`).join(", ");
    return h("section", { class: "panel box" },
      h("div", { class: "bar" }, h("h2", null, line(box.sandbox, 80)), badge(box.state), h("div", { class: "spring" }),
        h("button", { onclick: () => { change({ box: "" }); this.draw(); } }, "Close")),
      facts([
        ["Host", line(box.host)],
        box.cause ? ["Cause", [line(box.cause, 300), box.in_use === false ? " while idle" : ""]] : null,
        box.failed_at === null ? null : ["Failed", clock(box.failed_at)],
        box.recovered ? [this.found.server ? "Recovered" : "Environments that continued", line(means)] : null,
        box.recovery_s === null ? null : ["Longest recovery", duration(box.recovery_s)],
        this.found.server ? null : ["Served", box.number ? `${count(box.number)} episodes, ${clock(box.first)} to ${clock(box.last)}` : "no recorded episode"],
      ]),
      box.episodes.length ? h("p", { class: "served" }, box.episodes.length < box.number ? "Last episodes: " : "Episodes: ",
        box.episodes.map((id) => h("a", { href: link("episode", { run, id }) }, String(id)))) : null,
      this.historyTable(history.filter((row) => row.sandbox === box.sandbox), false),
      box.meaning ? h("p", { class: "note" }, line(`${box.cause}: ${box.meaning}.`, 400)) : null);
  }

  drawHistory() {
    const { history } = this.found;
    const rows = history.filter((row) => this.meets(row, row.sandbox, row.host, row.text, row.what));
    if (!rows.length) return [h("p", { class: "empty" }, history.length ? "No event matches." : "Nothing has failed.")];
    const table = this.historyTable([...rows].reverse(), true);
    table.classList.add("rows");
    return [h("p", { class: "note" }, `${count(rows.length)} events, the last one first.${this.found.server ? "" : " Recoveries within a second are one event."}`), table];
  }

  historyTable(rows, where) {
    if (!rows.length) return null;
    const { server } = this.found;
    const kinds = { failed: "failed", oom: "failed", timeout: "failed", taint: "failed", died: "failed", recovered: "finished", environment: "finished", created: "finished", host: "stopped" };
    const names = ["Time", ...(where ? ["Host", "Sandbox"] : []), "Event", "Cause", ...(server ? ["Duration"] : ["Environments", "Recovery"])];
    return grid(names, rows.map((row) => [
      [clock(row.time)],
      ...(where ? [[line(row.host, 40)], [row.sandbox ? h("a", { href: this.boxLink(row.sandbox) }, line(row.sandbox, 60)) : ""]] : []),
      [badge(row.what, kinds[row.what] ?? "stopped")],
      [h("span", { title: plain(row.meaning || row.text) }, line(row.text, 200)), "free"],
      ...(server ? [] : [[count(row.episodes), "num"]]), [duration(row.seconds), "num"]]));
  }

  drawCurves() {
    const names = Object.keys(this.metrics.values);
    if (!this.cards) {
      this.cards = new Cards([...SANDBOX_CHARTS, ...HOST_CHARTS].map(([title]) => title), (step) => this.found.server || go("episodes", { run: this.run.name, step }));
      this.none = h("p", { class: "empty" }, "This run has no metrics of sandboxes yet.");
      this.body.replaceChildren(this.none, this.cards.element);
    }
    this.none.hidden = names.some((name) => name.startsWith("sandbox/"));
    const draw = (title, lines) => this.cards.draw(title, this.run.name, this.metrics.steps, lines, this.found.server ? "second" : "step");
    for (const [title, parts] of SANDBOX_CHARTS) draw(title, parts.map((part) => [part.replaceAll("_", " "), this.metrics.values[`sandbox/${part}`]]));
    for (const [title, part] of HOST_CHARTS) {
      const own = names.filter((name) => name.startsWith("sandbox/host/") && name.endsWith(`/${part}`));
      draw(title, own.map((name) => [name.slice("sandbox/host/".length, -part.length - 1), this.metrics.values[name]]));
    }
  }

  turnTo(tab) {
    change({ tab });
    this.show(this.runs);
  }

  move(by) {
    if (this.tab || !this.shown?.length) return;
    this.cursor = Math.max(0, Math.min(this.shown.length - 1, this.cursor + by));
    this.draw();
    this.body.querySelector("tr.cursor")?.scrollIntoView({ block: "nearest" });
  }

  keys() {
    return {
      j: () => this.move(1), ArrowDown: () => this.move(1), k: () => this.move(-1), ArrowUp: () => this.move(-1),
      Enter: () => { if (!this.tab && this.shown?.[this.cursor]) location.hash = this.boxLink(this.shown[this.cursor].sandbox); },
      1: () => this.turnTo(""), 2: () => this.turnTo("history"), 3: () => this.turnTo("curves"),
    };
  }

  recolour() {
    this.cards?.recolour();
    if (this.cards) this.drawCurves();
  }

  clear() {
    this.cards?.destroy();
    this.cards = null;
    this.body.replaceChildren();
  }

  destroy() {
    this.clear();
  }
}

function clock(time) {
  return time === null ? "–" : new Date(1000 * time).toLocaleString();
}
