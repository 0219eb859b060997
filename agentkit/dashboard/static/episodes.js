// The list of a run's episodes, with filters. Only the rows in view are in the page.

import { badge, choice, count, duration, field, h, line, number, percent, plain } from "./dom.js";
import { change, go, link, route } from "./state.js";
import { distinct, filtered, loadTable, sorted } from "./table.js";

const ROW = 30;
const COLUMNS = [
  ["id", "Episode", "num"], ["step", "Step", "num"], ["ending", "Use", ""], ["outcome", "Outcome", "wide"], ["reward", "Return", "num"],
  ["success", "Success", "mid"], ["turns", "Turns", "num"], ["tokens", "Tokens", "num"], ["action_tokens", "Answers", "num"],
  ["staleness", "Stale", "num"], ["group_id", "Group", "num"], ["member", "Member", "num"], ["seed", "Seed", "num"],
  ["duration_s", "Duration", "num"], ["env_s", "Env. time", "num"], ["env_id", "Environment", "wide"],
];
const RANGES = [["step", "Step"], ["reward", "Return"], ["staleness", "Staleness"], ["turns", "Turns"], ["tokens", "Tokens"], ["duration_s", "Seconds"]];

/** The last list that was shown: the episodes before and after one are those of this list. */
export const lastList = { run: "", ids: [] };

export class Episodes {
  constructor(root) {
    this.filters = h("form", { class: "bar filters", onsubmit: (event) => event.preventDefault() });
    this.summary = h("p", { class: "note", role: "status" });
    this.head = h("div", { class: "row head", role: "row" });
    this.rows = h("div", { class: "window" });
    this.space = h("div", { class: "space" }, this.rows);
    this.scroller = h("div", { class: "list", role: "table", "aria-label": "Episodes", tabindex: 0, onscroll: () => this.drawRows() }, this.head, this.space);
    root.replaceChildren(h("h1", { class: "unseen" }, "Episodes"), this.filters, this.summary, this.scroller);
    this.cursor = -1;
  }

  async show(runs) {
    this.runs = runs.filter((run) => run.status !== "unreadable");
    const { params } = route();
    const latest = [...this.runs].sort((a, b) => (b.updated ?? 0) - (a.updated ?? 0))[0];
    const run = this.runs.find((one) => one.name === params.get("run")) ?? latest;
    if (!run) {
      this.summary.textContent = "There are no runs yet.";
      return;
    }
    if (params.get("run") !== run.name) change({ run: run.name });
    const table = await loadTable(run.name);
    if (route().view !== "episodes" || route().params.get("run") !== run.name) return;
    this.columns = table.columns;
    this.shown = COLUMNS.filter(([name]) => name !== "env_id" || new Set(this.columns.env_id).size > 1);
    if (this.run !== run.name || table.changed || this.address !== location.hash) {
      const other = this.run !== run.name || this.address !== location.hash;
      this.run = run.name;
      if (other || !this.filters.contains(document.activeElement)) this.drawFilters();
      this.apply(false);
    }
  }

  drawFilters() {
    const { params } = route();
    const set = (values) => { change(values); this.apply(true); };
    const options = (name) => [["", "all"], ...distinct(this.columns[name]).map((value) => [value, value])];
    this.filters.replaceChildren(
      choice("Run", this.run, this.runs.map((run) => [run.name, run.name]), (run) => go("episodes", { run })),
      choice("Use", params.get("ending"), options("ending"), (ending) => set({ ending })),
      choice("Outcome", params.get("outcome"), options("outcome"), (outcome) => set({ outcome })),
      ...(options("env_id").length > 2 || params.get("env_id") ? [choice("Environment", params.get("env_id"), options("env_id"), (env_id) => set({ env_id }))] : []),
      choice("Success", params.get("success"), [["", "all"], ["1", "yes"], ["0", "no"]], (success) => set({ success })),
      ...RANGES.map(([name, label]) => field(label, params.get(name), { class: "range", placeholder: "5 or 1..9", autocomplete: "off" }, (value) => set({ [name]: value }))),
      field("Group", params.get("group_id"), { class: "range", inputmode: "numeric" }, (group_id) => set({ group_id })),
      field("Error or reason", params.get("error"), { type: "search", class: "search", placeholder: "contains", "data-search": "" }, (error) => set({ error })),
      h("button", { type: "button", onclick: () => { location.hash = link("episodes", { run: this.run }); } }, "Clear"));
    this.filters.querySelectorAll("select").forEach((select) => select.parentElement.classList.toggle("set", select.selectedIndex > 0 && select.ariaLabel !== "Run"));
  }

  apply(byUser) {
    const began = performance.now();
    const { params } = route();
    this.address = location.hash;
    const sort = COLUMNS.some(([name]) => name === params.get("sort")) ? params.get("sort") : "id";
    const descending = params.get("order") !== "up";
    this.found = sorted(this.columns, filtered(this.columns, params), sort, descending);
    lastList.run = this.run;
    lastList.ids = this.found.map((row) => this.columns.id[row]);
    this.cursor = Math.min(this.cursor, this.found.length - 1);
    this.head.replaceChildren(...this.shown.map(([name, label, kind]) => h("button", {
      class: `cell ${kind} c-${name}`, role: "columnheader", "aria-sort": name === sort ? (descending ? "descending" : "ascending") : null,
      onclick: () => { change({ sort: name, order: name === sort && descending ? "up" : "" }); this.apply(true); },
    }, label, name === sort ? (descending ? " ↓" : " ↑") : "")));
    this.space.style.height = `${this.found.length * ROW}px`;
    if (byUser) this.scroller.scrollTop = 0;
    this.drawSummary();
    this.drawRows();
    this.scroller.dataset.ms = String(Math.round(performance.now() - began));
  }

  drawSummary() {
    const { reward, success, turns, outcome } = this.columns;
    const valid = this.found.filter((row) => outcome[row] !== "voided");
    const mean = (column) => valid.reduce((sum, row) => sum + (column[row] ?? 0), 0) / valid.length;
    this.summary.replaceChildren(
      h("strong", null, count(this.found.length)), ` of ${count(this.columns.id.length)} episodes`,
      valid.length ? ` · success ${percent(mean(success))} · mean return ${number(mean(reward))} · ${number(mean(turns))} turns` : "",
      valid.length && valid.length < this.found.length ? ` (without ${count(this.found.length - valid.length)} whose environment failed)` : "");
  }

  drawRows() {
    const first = Math.max(0, Math.floor(this.scroller.scrollTop / ROW) - 5);
    const last = Math.min(this.found.length, first + Math.ceil(this.scroller.clientHeight / ROW) + 12);
    this.rows.style.transform = `translateY(${first * ROW}px)`;
    this.rows.replaceChildren(...this.found.slice(first, last).map((row, index) => this.row(row, first + index)));
    if (!this.found.length) this.rows.replaceChildren(h("p", { class: "empty" }, this.columns.id.length ? "No episode matches." : "This run has recorded no episode yet."));
  }

  row(row, place) {
    const value = (name) => this.columns[name][row];
    const cells = {
      ending: () => [badge(value("ending")), value("ending_reason") ? h("small", null, line(value("ending_reason"), 40)) : null],
      outcome: () => [value("outcome"), value("reason") ? h("small", { title: plain(value("reason").slice(0, 300)) }, line(value("reason"), 60)) : null],
      reward: () => h("span", { class: value("reward") > 0 ? "good" : value("reward") < 0 ? "bad" : null }, number(value("reward"))),
      success: () => (value("success") ? "✓" : "·"),
      duration_s: () => duration(value("duration_s")),
      env_s: () => duration(value("env_s")),
      env_id: () => line(value("env_id"), 40),
    };
    return h("a", { class: `row ${place === this.cursor ? "cursor" : ""}`, role: "row", href: link("episode", { run: this.run, id: value("id") }), tabindex: -1 },
      this.shown.map(([name, , kind]) => h("span", { class: `cell ${kind} c-${name}`, role: "cell" }, cells[name] ? cells[name]() : value(name) === null ? "–" : String(value(name)))));
  }

  move(by) {
    this.cursor = Math.max(0, Math.min(this.found.length - 1, this.cursor + by));
    const top = this.cursor * ROW;
    if (top < this.scroller.scrollTop) this.scroller.scrollTop = top;
    if (top + 2 * ROW > this.scroller.scrollTop + this.scroller.clientHeight) this.scroller.scrollTop = top + 2 * ROW - this.scroller.clientHeight;
    this.drawRows();
  }

  keys() {
    return {
      j: () => this.move(1), ArrowDown: () => this.move(1), k: () => this.move(-1), ArrowUp: () => this.move(-1),
      Enter: () => this.cursor >= 0 && go("episode", { run: this.run, id: this.columns.id[this.found[this.cursor]] }),
    };
  }

  destroy() {}
}
