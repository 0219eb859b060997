// The page: its header, the view of the address, updates, and keys.

import { ask, isCopy, onlyEpisode } from "./data.js";
import { h } from "./dom.js";
import { Episode } from "./episode.js";
import { Episodes } from "./episodes.js";
import { Overview } from "./overview.js";
import { Pipeline } from "./pipeline.js";
import { Sandboxes } from "./sandboxes.js";
import { go, link, route } from "./state.js";

const EVERY_MS = 3000;
const VIEWS = { overview: Overview, episodes: Episodes, episode: Episode, pipeline: Pipeline, sandboxes: Sandboxes };
const THEMES = { "": "Theme: system", light: "Theme: light", dark: "Theme: dark" };
const KEYS = [
  ["o", "overview", true], ["e", "episodes", true], ["g", "pipeline", true], ["s", "sandboxes", true], ["/", "search", true], ["j / k", "next, previous row or turn"], ["Enter", "open the row", true],
  ["n / p", "next, previous episode", true], ["1 2 3", "parts of the view"], ["← →", "previous, next token or step"], ["Esc", "back", true], ["t", "theme"], ["?", "these keys"],
].filter(([, , ofSeveralViews]) => !onlyEpisode || !ofSeveralViews);

const root = document.getElementById("view");
const status = h("span", { class: "status", role: "status" });
const theme = h("button", { class: "theme", onclick: () => nextTheme() });
const help = h("dialog", { class: "help", "aria-label": "Keys" });
let current = null;
let shown = "";
let lastAnswer = "";
let onlyServers = false; // there are sandbox servers, and no runs

function drawHeader() {
  const { view } = route();
  const run = ofOneRun();
  const tab = (name, text) => h("a", { href: link(name, name === "overview" ? {} : { run }), "aria-current": view.startsWith(name.slice(0, 7)) ? "page" : null }, text);
  document.getElementById("top").replaceChildren(
    ...(onlyEpisode ? [h("span", { class: "brand" }, "agentkit")] : [
      h("a", { class: "brand", href: link("overview") }, h("img", { src: "icon.svg", alt: "", width: 20, height: 20 }), "agentkit"),
      h("nav", { "aria-label": "Views" }, onlyServers ? null : [tab("overview", "Overview"), tab("episodes", "Episodes"), tab("pipeline", "Pipeline")], tab("sandboxes", "Sandboxes"))]),
    h("div", { class: "spring" }), status, theme, h("button", { onclick: () => help.showModal(), title: "Keys (?)" }, "?"));
}

function setTheme(value) {
  if (value) document.documentElement.dataset.theme = value;
  else delete document.documentElement.dataset.theme;
  theme.textContent = THEMES[value];
  try {
    localStorage.setItem("agentkit-theme", value);
  } catch { /* a page from a file may have no storage */ }
  current?.recolour?.();
}

function nextTheme() {
  const names = Object.keys(THEMES);
  setTheme(names[(names.indexOf(document.documentElement.dataset.theme ?? "") + 1) % names.length]);
}

function storedTheme() {
  try {
    return localStorage.getItem("agentkit-theme") ?? "";
  } catch {
    return "";
  }
}

async function update() {
  try {
    const all = await ask("runs");
    const runs = all.filter((run) => !run.server);
    onlyServers = all.length > 0 && !runs.length;
    if (onlyServers && route().view === "overview") history.replaceState(null, "", link("sandboxes", {}));
    const running = runs.filter((run) => run.status === "running").length;
    status.textContent = onlyEpisode ? "one episode" : isCopy ? "static copy" : onlyServers ? "sandbox server" : running ? `${running} running` : "nothing is running";
    status.className = running && !isCopy ? "status live" : "status";
    const { view } = route();
    if (shown !== view) {
      current?.destroy();
      root.replaceChildren();
      root.className = view;
      current = new (VIEWS[view] ?? Overview)(root);
      shown = view;
      lastAnswer = "";
    }
    const answer = JSON.stringify([all, location.hash]);
    if (answer !== lastAnswer) {
      lastAnswer = answer;
      drawHeader();
      await current.show(view === "sandboxes" ? all : runs);
    }
  } catch (error) {
    lastAnswer = ""; // draw again when the server answers
    status.textContent = error instanceof TypeError ? "the server does not answer" : error.message;
    status.className = "status wrong";
  }
}

async function repeat() {
  if (!document.hidden) await update();
  setTimeout(repeat, EVERY_MS);
}

/** The run of the view; null in the overview, whose address names those that are selected. */
function ofOneRun() {
  const { view, params } = route();
  return view === "overview" ? null : params.get("run");
}

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "Escape") {
    if (help.open) return;
    if (document.activeElement?.matches("input, select")) document.activeElement.blur();
    else if (route().view === "episode") go("episodes", { run: route().params.get("run") });
    return;
  }
  if (event.target.matches?.("input:not([type=checkbox]):not([type=range]), select, textarea")) return;
  const actions = {
    o: () => go("overview"),
    e: () => go("episodes", { run: ofOneRun() }),
    g: () => go("pipeline", { run: ofOneRun() }),
    s: () => go("sandboxes", { run: ofOneRun() }),
    t: nextTheme,
    "?": () => help.showModal(),
    "/": () => root.querySelector("[data-search]")?.focus(),
  };
  const action = actions[event.key] ?? current?.keys?.()[event.key];
  if (action) {
    event.preventDefault();
    action();
  }
}

help.append(
  h("h2", null, "Keys"),
  h("dl", null, KEYS.map(([key, meaning]) => h("div", null, h("dt", null, h("kbd", null, key)), h("dd", null, meaning)))),
  h("form", { method: "dialog" }, h("button", null, "Close")));
document.body.append(help);
if (new URLSearchParams(location.search).has("token")) history.replaceState(null, "", location.pathname + location.hash);
setTheme(storedTheme());
if (onlyEpisode && route().view !== "episode") history.replaceState(null, "", link("episode", onlyEpisode));
drawHeader();
addEventListener("hashchange", update);
addEventListener("keydown", onKey);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => current?.recolour?.());
document.addEventListener("visibilitychange", () => document.hidden || update());
if (isCopy) update();
else repeat();
