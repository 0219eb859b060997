// Alerts of runs: what is wrong, its likely cause, and what to do.

import { ask } from "./data.js";
import { badge, count, h, line, safe, unseen } from "./dom.js";
import { link } from "./state.js";

const TITLES = { slow_phase: "Slow phase", aborts: "Aborts", no_signal: "No learning signal", truncated: "Truncated",
  off_policy: "Off policy", one_failure: "One type of failure", slow_host: "Slow host" };

/** The name of the tab, with the number of alerts that the runs have now. */
export function alertsTab(runs) {
  const now = runs.reduce((sum, run) => sum + (run.alerts ?? 0), 0);
  return now ? `Alerts (${count(now)})` : "Alerts";
}

/** A mark beside the status of a run that has alerts; null if it has none. */
export function alertsMark(run) {
  if (!run.alerts) return null;
  const text = run.alerts === 1 ? "1 alert" : `${count(run.alerts)} alerts`;
  return h("a", { class: "alerts", href: link("overview", { run: run.name, tab: "alerts" }) }, badge(text, "failed"));
}

/** The alerts of some runs, those that have not ended first, then the newest; ``colour`` gives that of a run. */
export async function alertsOf(runs, colour) {
  const lists = await Promise.all(runs.filter((run) => run.status !== "unreadable").map(async (run) =>
    (await ask("alerts", { run: run.name })).map((alert) => ({ run, ...alert }))));
  const alerts = lists.flat().sort((a, b) => (a.ended !== null) - (b.ended !== null) || b.time - a.time);
  if (!alerts.length) return h("p", { class: "empty" }, "The selected runs have had no alert.");
  const names = [[unseen("Colour"), ""], ["Run", ""], ["Alert", ""], ["Steps", "num"], ["What is wrong, why, and what to do", ""]];
  return h("div", { class: "scroll free", tabindex: 0 }, h("table", { class: "grid alertlist" },
    h("thead", null, h("tr", null, names.map(([name, kind]) => h("th", { scope: "col", class: kind || null }, name)))),
    h("tbody", null, alerts.map((alert) => h("tr", { class: alert.ended === null ? "open" : null },
      h("td", null, h("i", { class: "dot", style: { background: colour(alert.run.name) } })),
      h("td", null, line(alert.run.name)),
      h("td", null, badge(TITLES[alert.name] ?? alert.name, alert.ended === null ? "failed" : ""), h("small", null, line(alert.subject))),
      h("td", { class: "num" }, lasted(alert)),
      h("td", { class: "text" }, h("div", { class: "strong" }, withCode(alert.text)),
        h("div", null, "Cause: ", withCode(alert.cause)), h("div", null, "Remedy: ", withCode(alert.remedy))))))));
}

/** The steps from the beginning of an alert to its end, with a link to the episodes of the first one. */
function lasted(alert) {
  const open = alert.run.status === "running" ? "now" : "the end";
  return [h("a", { href: link("episodes", { run: alert.run.name, step: alert.step, ending: "trained" }) }, count(alert.step)),
    ` to ${alert.ended === null ? open : count(alert.ended)}`];
}

/** A text in which parts between backticks are code. */
function withCode(text) {
  return text.split("`").map((part, index) => (index % 2 ? h("code", null, safe(part)) : safe(part))).flat();
}
