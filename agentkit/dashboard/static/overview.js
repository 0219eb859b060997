// Runs, their curves, evaluations, settings and alerts.

import { alertsMark, alertsOf, alertsTab } from "./alerts.js";
import { COLOURS, Chart } from "./chart.js";
import { band, joined, matching, smoothed } from "./curves.js";
import { ask, isCopy } from "./data.js";
import { ago, badge, choice, count, duration, field, h, line, number, percent, plain, short, unseen } from "./dom.js";
import { change, go, link, route } from "./state.js";

const MAIN = ["eval/success", "rollout/success", "rollout/return_mean", "rollout/turns_mean", "policy/entropy", "policy/loss",
  "staleness/mean", "engine/tokens_per_s", "time/step", "env/failures"];
const SELECTED_AT_FIRST = 6;
const MOST_INTERVALS = 3; // more bands hide each other
const TABS = [["curves", "Curves"], ["evaluation", "Evaluation"], ["settings", "Settings"], ["alerts", "Alerts"]];

export class Overview {
  constructor(root) {
    this.root = root;
    this.charts = new Map();
    this.colours = new Map();
    this.metrics = new Map();
    this.settings = new Map();
    this.visible = new Set();
    this.table = h("div", { class: "runs" });
    this.tabs = h("nav", { class: "tabs", "aria-label": "Part" });
    this.body = h("section", { class: "body" });
    root.replaceChildren(this.table, this.tabs, this.body);
    this.observer = new IntersectionObserver((entries) => {
      for (const { target, isIntersecting } of entries) {
        if (isIntersecting) this.visible.add(target.dataset.metric);
        else this.visible.delete(target.dataset.metric);
      }
      this.drawCharts();
    }, { rootMargin: "300px" });
  }

  async show(runs) {
    this.runs = runs;
    const tab = route().params.get("tab") ?? "curves";
    if (tab !== this.tab) this.clear();
    this.tab = tab;
    this.drawRuns();
    this.drawTabs();
    if (!runs.length) {
      this.body.replaceChildren(h("p", { class: "empty" }, "No runs yet. A run appears here when it starts."));
      return;
    }
    const selected = this.selected();
    if (tab === "alerts") return this.drawAlerts(selected);
    if (tab === "settings") await this.loadSettings(selected);
    else await this.loadMetrics(selected);
    if (tab !== this.tab || route().view !== "overview") return;
    if (tab === "settings") this.drawSettings(selected);
    else if (tab === "evaluation") this.drawEvaluations(selected);
    else this.drawCurves(selected);
  }

  selected() {
    const names = route().params.getAll("run");
    if (names.length) return this.runs.filter((run) => names.includes(run.name));
    return [...this.runs].sort((a, b) => (b.updated ?? 0) - (a.updated ?? 0)).slice(0, SELECTED_AT_FIRST)
      .sort((a, b) => this.runs.indexOf(a) - this.runs.indexOf(b));
  }

  /** Give each selected run the least used colour; runs that stay selected keep theirs. Runs of one band share one. */
  chooseColours() {
    const key = (run) => (route().params.get("seeds") === "band" && run.family) || run.name;
    const kept = new Map();
    const used = new Map(COLOURS.map((colour) => [colour, 0]));
    const keys = new Set(this.selected().map(key));
    for (const [one, colour] of this.keyed ?? []) {
      if (!keys.has(one)) continue;
      used.set(colour, used.get(colour) + 1);
      kept.set(one, colour);
    }
    for (const one of keys) {
      if (kept.has(one)) continue;
      const [colour] = [...used].sort((a, b) => a[1] - b[1])[0];
      used.set(colour, used.get(colour) + 1);
      kept.set(one, colour);
    }
    this.keyed = kept;
    this.colours = new Map(this.selected().map((run) => [run.name, kept.get(key(run))]));
  }

  colour(name) {
    return this.colours.get(name) ?? "transparent";
  }

  select(name, on) {
    const names = this.selected().map((run) => run.name).filter((one) => one !== name);
    change({ run: on ? [...names, name] : names.length ? names : "none" });
    this.show(this.runs);
  }

  drawRuns() {
    this.chooseColours();
    const { params } = route();
    const search = params.get("find") ?? "";
    const selected = new Set(this.selected().map((run) => run.name));
    const shown = matching(this.runs.map((run) => run.name), search);
    const first = (run) => (run.status === "running" ? 0 : 1);
    const ordered = this.runs.filter((run) => shown.includes(run.name)).sort((a, b) => first(a) - first(b));
    const rows = ordered.map((run) => this.row(run, selected.has(run.name)));
    const names = [unseen("Selected"), "Run", "Status", "Progress", "Left", "Success", "Return", "Episodes", "Tokens", "Env. time", "Worked", "Updated"];
    const table = h("table", { class: "grid" },
      h("thead", null, h("tr", null, names.map((name, index) => h("th", { class: index > 4 && index < 11 ? "num" : null, scope: "col" }, name)))),
      h("tbody", null, rows));
    if (!this.search) {
      this.search = field("Runs", search, { type: "search", placeholder: "Find runs", class: "search", "data-search": "" },
        (value) => { change({ find: value }); this.drawRuns(); });
      this.tableBody = h("div", { class: "scroll", tabindex: 0 });
      const all = h("button", { onclick: () => { change({ run: matching(this.runs.map((run) => run.name), route().params.get("find")) }); this.show(this.runs); } }, "Select all");
      const none = h("button", { onclick: () => { change({ run: "none" }); this.show(this.runs); } }, "None");
      this.title = h("h1", null, "Runs");
      this.table.replaceChildren(h("div", { class: "bar" }, this.title, h("div", { class: "spring" }), this.search, all, none), this.tableBody);
    }
    this.title.textContent = `Runs (${this.runs.length})`;
    const focused = this.tableBody.contains(document.activeElement) && document.activeElement;
    const place = focused && [focused.closest("tr")?.dataset.run, focused.matches("input") ? "input" : "a"];
    this.tableBody.replaceChildren(table);
    if (place) table.querySelector(`tr[data-run="${CSS.escape(place[0] ?? "")}"] ${place[1]}`)?.focus();
  }

  row(run, on) {
    const box = h("input", { type: "checkbox", "aria-label": `Show ${run.name}`, checked: on, onchange: () => this.select(run.name, box.checked) });
    if (run.status === "unreadable") {
      return h("tr", null, h("td", null, box), h("td", null, line(run.name)), h("td", { colspan: 10, class: "wrong" }, line(run.error, 400)));
    }
    const share = run.steps ? Math.min(1, run.step / run.steps) : 1;
    const episodes = Object.values(run.counts).reduce((a, b) => a + b, 0);
    const endings = Object.entries(run.counts).map(([ending, one]) => `${count(one)} ${ending}`).join(", ");
    const mark = h("i", { class: "dot", style: { background: this.colour(run.name) } });
    return h("tr", { class: on ? "on" : null, "data-run": run.name },
      h("td", { class: "pick" }, h("label", null, box, mark)),
      h("td", { class: "name", title: plain(run.path) }, h("a", { href: link("episodes", { run: run.name }) }, line(run.name)),
        h("small", null, line([run.env, run.algorithm].filter(Boolean).join(" · ")))),
      h("td", { title: run.error ? plain(run.error) : null }, badge(run.status), alertsMark(run), run.error ? h("small", { class: "wrong" }, line(run.error, 36)) : null),
      h("td", null, run.steps ? h("div", { class: "progress", title: `step ${run.step} of ${run.steps}` },
        h("div", { style: { width: `${100 * share}%` } }), h("span", null, `${count(run.step)} / ${count(run.steps)}`)) : "–"),
      h("td", null, duration(run.left_s)),
      h("td", { class: "num", title: run.latest ? `95 % interval ${percent(run.latest.low)} to ${percent(run.latest.high)}, ${run.latest.episodes} episodes` : null },
        percent(run.latest?.success), run.latest && run.before && run.latest.step ? h("small", null, `before ${percent(run.before.success)}`) : null),
      h("td", { class: "num" }, number(run.return)),
      h("td", { class: "num", title: endings }, count(episodes)),
      h("td", { class: "num", title: run.action_tokens === null ? null : `${count(run.action_tokens)} of answers` }, short(run.tokens)),
      h("td", { class: "num", title: `episodes took ${duration(run.duration_s)} in all` }, duration(run.env_s)),
      h("td", { class: "num" }, duration(run.seconds)),
      h("td", null, isCopy ? new Date(1000 * run.updated).toLocaleString() : ago(run.updated)));
  }

  drawTabs() {
    const now = route().params.get("tab") ?? "curves";
    this.tabs.replaceChildren(...TABS.map(([tab, text]) =>
      h("button", { "aria-current": tab === now ? "page" : null, onclick: () => { change({ tab: tab === "curves" ? "" : tab }); this.show(this.runs); } },
        tab === "alerts" ? alertsTab(this.selected()) : text)));
  }

  clear() {
    this.charts.forEach((chart) => chart.destroy());
    this.charts.clear();
    this.visible.clear();
    this.observer.disconnect();
    this.tools = null;
    this.body.replaceChildren();
  }

  async loadMetrics(runs) {
    await Promise.all(runs.map(async (run) => {
      const stamp = JSON.stringify([run.updated, run.latest]);
      if (run.status === "unreadable" || this.metrics.get(run.name)?.stamp === stamp) return;
      this.metrics.set(run.name, { stamp, ...await ask("metrics", { run: run.name }) });
    }));
  }

  async loadSettings(runs) {
    await Promise.all(runs.map(async (run) => {
      if (run.status !== "unreadable" && !this.settings.has(run.name)) this.settings.set(run.name, await ask("settings", { run: run.name }));
    }));
  }

  drawCurves(selected) {
    const { params } = route();
    const names = [...new Set(selected.flatMap((run) => Object.keys(this.metrics.get(run.name)?.values ?? {})))].sort();
    const search = params.get("q") ?? "";
    const key = JSON.stringify([names, search]);
    if (!this.tools) {
      this.tools = this.curveTools();
      this.sections = h("div", null);
      this.body.replaceChildren(this.tools, this.sections);
      this.sectionKey = null;
    }
    if (this.sectionKey !== key) {
      this.sectionKey = key;
      this.charts.forEach((chart) => chart.destroy());
      this.charts.clear();
      this.visible.clear();
      this.observer.disconnect();
      this.sections.replaceChildren(...this.sectionsOf(names, search));
    }
    this.drawCharts();
  }

  curveTools() {
    const { params } = route();
    const again = (values) => { change(values); this.drawCurves(this.selected()); };
    const weight = h("output", null, params.get("smooth") ?? "0.6");
    const slider = h("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: params.get("smooth") ?? 0.6, "aria-label": "Smoothing",
      oninput: () => { weight.textContent = slider.value; again({ smooth: slider.value }); } });
    const seeds = h("input", { type: "checkbox", checked: params.get("seeds") === "band", onchange: () => { again({ seeds: seeds.checked ? "band" : "" }); this.drawRuns(); this.drawCharts(); } });
    return h("div", { class: "bar tools" },
      field("Metrics", params.get("q"), { type: "search", placeholder: "Find metrics: entropy, ^critic/, …", class: "search wide", "data-search": "" }, (value) => again({ q: value })),
      h("label", { class: "field" }, h("span", null, "Smoothing"), slider, weight),
      choice("Over", params.get("x") ?? "", [["", "steps"], ["time", "minutes"]], (value) => again({ x: value })),
      h("label", { class: "field check", title: "Runs whose settings differ only in the seed: mean, smallest and largest" }, seeds, h("span", null, "Seeds as bands")));
  }

  sectionsOf(names, search) {
    const found = matching(names, search);
    if (!found.length) return [h("p", { class: "empty" }, names.length ? "No metric matches." : "These runs have no metrics yet.")];
    if (search) return [this.cards(found)];
    const main = MAIN.filter((name) => names.includes(name));
    const prefixes = [...new Set(names.map((name) => name.split("/")[0]))];
    return [
      this.cards(main),
      ...prefixes.map((prefix) => {
        const own = names.filter((name) => name.split("/")[0] === prefix);
        return h("details", { class: "section" }, h("summary", null, prefix, h("small", null, String(own.length))), this.cards(own));
      }),
    ];
  }

  cards(names) {
    return h("div", { class: "cards" }, names.map((name) => {
      const chart = new Chart(name, (run, x) => route().params.get("x") !== "time" && go("episodes", { run, step: x, ending: name.startsWith("eval/") ? "eval" : "trained" }));
      chart.element.dataset.metric = `${this.charts.size} ${name}`;
      this.charts.set(chart.element.dataset.metric, chart);
      this.observer.observe(chart.element);
      return chart.element;
    }));
  }

  drawCharts() {
    if (this.tab !== "curves" || route().view !== "overview") return;
    const selected = this.selected();
    for (const key of this.visible) {
      const name = key.slice(key.indexOf(" ") + 1);
      const { xs, lines } = this.linesOf(name, selected);
      this.charts.get(key)?.draw(xs, lines, route().params.get("x") === "time" ? "minute" : "step");
    }
  }

  linesOf(name, selected) {
    const { params } = route();
    const weight = name.startsWith("eval/") ? 0 : Number(params.get("smooth") ?? 0.6);
    const present = selected.filter((run) => this.metrics.get(run.name)?.values[name]);
    const [xs, ...columns] = joined(present.map((run) => {
      const { steps, times, values } = this.metrics.get(run.name);
      const x = params.get("x") === "time" ? times.map((time) => Math.round((time - run.started) / 6) / 10) : steps;
      return [x, values[name]];
    }));
    if (params.get("seeds") === "band") return { xs, lines: this.bands(present, columns, weight) };
    return {
      xs,
      lines: present.map((run, index) => ({
        label: run.name, run: run.name, colour: this.colour(run.name), values: smoothed(columns[index], weight),
        faint: weight ? columns[index] : null, ...(name === "eval/success" ? this.interval(run, xs, present.length <= MOST_INTERVALS) : {}),
      })),
    };
  }

  interval(run, xs, drawn) {
    const { evaluations } = this.metrics.get(run.name);
    if (route().params.get("x") === "time" || !evaluations.length) return {};
    const at = new Map(evaluations.map((one) => [one.step, one]));
    const column = (part) => xs.map((x) => at.get(x)?.[part] ?? null);
    return { ...(drawn ? { low: column("low"), high: column("high") } : {}),
      interval: xs.map((x) => (at.has(x) ? `(${percent(at.get(x).low, 0)}–${percent(at.get(x).high, 0)})` : "")) };
  }

  bands(runs, columns, weight) {
    const families = new Map();
    runs.forEach((run, index) => families.set(run.family, [...(families.get(run.family) ?? []), [run, smoothed(columns[index], weight)]]));
    return [...families.values()].map((members) => {
      const { mean, low, high } = band(members.map(([, column]) => column));
      const [run] = members[0];
      const one = { label: members.map(([each]) => each.name).join(", "), run: run.name, colour: this.colour(run.name), values: mean };
      return members.length > 1 ? { ...one, low, high } : one;
    });
  }

  drawEvaluations(selected) {
    const rows = selected.flatMap((run) => (this.metrics.get(run.name)?.evaluations ?? []).map((one) => [run, one]));
    if (!rows.length) {
      this.body.replaceChildren(h("p", { class: "empty" }, "The selected runs have no evaluation yet."));
      return;
    }
    const names = [[unseen("Colour"), ""], ["Run", ""], ["Step", "num"], ["Success", "num"], ["95 % interval", "num"], [unseen("Drawn"), ""], ["Episodes", "num"], ["Return", "num"]];
    this.body.replaceChildren(
      h("p", { class: "note" }, "Share of evaluation episodes that succeeded, with the Wilson 95 % interval. Episodes whose environment failed do not count."),
      h("table", { class: "grid evaluations" },
        h("thead", null, h("tr", null, names.map(([name, kind]) => h("th", { scope: "col", class: kind || null }, name)))),
        h("tbody", null, rows.map(([run, one]) => h("tr", null,
          h("td", null, h("i", { class: "dot", style: { background: this.colour(run.name) } })),
          h("td", null, line(run.name)),
          h("td", { class: "num" }, count(one.step)),
          h("td", { class: "num strong" }, percent(one.success)),
          h("td", { class: "num" }, `${percent(one.low)} – ${percent(one.high)}`),
          h("td", { class: "wide" }, h("div", { class: "interval" },
            h("div", { class: "range", style: { left: `${100 * one.low}%`, width: `${100 * (one.high - one.low)}%`, background: `${this.colour(run.name)}55` } }),
            h("div", { class: "point", style: { left: `${100 * one.success}%`, background: this.colour(run.name) } }))),
          h("td", { class: "num" }, h("a", { href: link("episodes", { run: run.name, ending: "eval", step: one.step }) }, count(one.episodes))),
          h("td", { class: "num" }, number(this.metricAt(run, "eval/return_mean", one.step))))))));
  }

  metricAt(run, name, step) {
    const { steps, values } = this.metrics.get(run.name);
    return values[name]?.[steps.indexOf(step)];
  }

  drawSettings(selected) {
    const { params } = route();
    const all = selected.map((run) => this.settings.get(run.name) ?? {});
    const names = [...new Set(all.flatMap((settings) => Object.keys(settings)))];
    const text = (value) => (value === undefined ? "–" : value === null ? "null" : typeof value === "string" ? value : JSON.stringify(value));
    const differs = (name) => new Set(all.map((settings) => text(settings[name]))).size > 1;
    const onlyDifferent = (params.get("all") ?? (selected.length > 1 ? "" : "1")) !== "1";
    const shown = matching(names, params.get("set")).filter((name) => !onlyDifferent || differs(name));
    const table = h("div", { class: "scroll free", tabindex: 0 }, h("table", { class: "grid settings" },
      h("thead", null, h("tr", null, h("th", { scope: "col" }, "Setting"), selected.map((run) =>
        h("th", { scope: "col" }, h("i", { class: "dot", style: { background: this.colour(run.name) } }), line(run.name))))),
      h("tbody", null, shown.map((name) => h("tr", { class: differs(name) ? "differs" : null }, h("th", { scope: "row" }, line(name)),
        all.map((settings) => h("td", null, line(text(settings[name])))))))));
    const rest = shown.length ? null : h("p", { class: "empty" }, onlyDifferent ? "All settings are equal." : "No setting matches.");
    if (!this.settingsTable) this.settingsTable = h("div", null);
    this.settingsTable.replaceChildren(table, ...(rest ? [rest] : []));
    if (this.tools?.dataset.tab !== "settings") {
      const again = (values) => { change(values); this.drawSettings(this.selected()); };
      const box = h("input", { type: "checkbox", checked: onlyDifferent, onchange: () => again({ all: box.checked ? "0" : "1" }) });
      this.tools = h("div", { class: "bar tools", "data-tab": "settings" },
        field("Settings", params.get("set"), { type: "search", placeholder: "Find settings", class: "search wide", "data-search": "" }, (value) => again({ set: value })),
        h("label", { class: "field check" }, box, h("span", null, "Only differences")));
      this.body.replaceChildren(this.tools, this.settingsTable);
    }
  }

  async drawAlerts(selected) {
    const list = await alertsOf(selected, (name) => this.colour(name));
    if (this.tab === "alerts" && route().view === "overview") this.body.replaceChildren(list);
  }

  recolour() {
    this.charts.forEach((chart) => chart.recolour());
    this.drawCharts();
  }

  destroy() {
    this.clear();
  }
}
