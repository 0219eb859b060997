// One episode: conversation, tokens, and its group.

import { ask, drawnPage } from "./data.js";
import { badge, block, count, duration, facts, h, line, number, plain, safe } from "./dom.js";
import { lastList } from "./episodes.js";
import { groupView } from "./group.js";
import { replayPanel } from "./replay.js";
import { change, go, link, route } from "./state.js";
import { TokenView } from "./tokens.js";

const PARTS = [["", "Conversation"], ["tokens", "Tokens"], ["group", "Group"]];

const UNDER_HEADER = 70; // pixels

export class Episode {
  constructor(root) {
    this.root = root;
    this.known = new Map();
  }

  async show() {
    const { params } = route();
    const [run, id] = [params.get("run"), params.get("id")];
    if (this.address === location.hash) return;
    const address = this.address = location.hash;
    const nothing = (error) => ({ advantages: null, values: [], note: error.message });
    try {
      const [episode, credit] = await Promise.all([this.load("episode", run, id), this.load("credit", run, id).catch(nothing)]);
      if (address === location.hash) this.draw(run, episode, credit);
    } catch (error) {
      if (address !== location.hash) return;
      this.address = null; // ask again at the next update
      this.root.replaceChildren(h("p", { class: "empty wrong" }, safe(error.message)));
    }
  }

  async load(question, run, id) {
    const key = JSON.stringify([question, run, id]);
    if (this.known.has(key)) return this.known.get(key);
    const answer = await ask(question, { run, id });
    if (answer.advantages !== null) this.known.set(key, answer); // they are missing while the step is in progress
    return answer;
  }

  draw(run, episode, credit) {
    const part = route().params.get("part") ?? "";
    const ids = lastList.run === run ? lastList.ids : [];
    const place = ids.indexOf(episode.id);
    this.run = run;
    this.before = place > 0 ? ids[place - 1] : null;
    this.after = place >= 0 && place + 1 < ids.length ? ids[place + 1] : null;
    const step = (id, text) => h("a", { class: "button", href: id === null ? null : link("episode", { run, id, part }), "aria-disabled": id === null ? "true" : null }, text);
    const head = h("div", { class: "bar" },
      h("a", { href: link("episodes", { run }), class: "crumb" }, line(run)),
      h("h1", null, `Episode ${episode.id}`), badge(episode.ending), episode.ending_reason ? h("small", null, line(episode.ending_reason)) : null,
      h("div", { class: "spring" }), step(this.before, "← Previous"), step(this.after, "Next →"));
    const tabs = h("nav", { class: "tabs", "aria-label": "Part" }, PARTS.map(([name, text]) =>
      h("button", { "aria-current": name === part ? "page" : null, onclick: () => this.turnTo(name) },
        name === "group" ? `${text} (${episode.group.length})` : text)));
    this.body = h("section", { class: "body" });
    this.root.replaceChildren(head, this.facts(run, episode), tabs, this.body);
    this.tokens?.destroy();
    this.tokens = null;
    if (part === "tokens") {
      this.tokens = new TokenView(this.body, run, episode, credit);
    } else if (part === "group") {
      this.drawGroup(run, episode);
    } else {
      this.body.replaceChildren(replayPanel(run, episode), ...conversation(episode));
      this.drawPictures(run, episode);
    }
  }

  facts(run, episode) {
    const waiting = episode.duration_s === null ? null : Math.max(0, episode.duration_s - episode.generate_s - episode.env_s);
    const share = (seconds, kind, text) => h("div", { class: kind, title: `${text}: ${duration(seconds)}`, style: grow(seconds) });
    return h("div", { class: "panel" },
      facts([
        ["Return", h("strong", { class: episode.reward > 0 ? "good" : episode.reward < 0 ? "bad" : null }, number(episode.reward))],
        ["Solved", episode.success ? "yes" : "no"],
        ["Outcome", [episode.outcome, episode.reason ? [" · ", line(episode.reason, 400)] : null].flat()],
        ["Environment", line(episode.env_id)],
        ["Seed", String(episode.seed)],
        ["Step", h("a", { href: link("episodes", { run, step: episode.step }) }, String(episode.step))],
        ["Version", String(episode.version_started)],
        ["Group", h("a", { href: link("episodes", { run, group_id: episode.group_id, ...(episode.ending === "eval" ? { ending: "eval" } : {}) }) }, `${episode.group_id}, member ${episode.member}`)],
        episode.attempt ? ["Attempt", String(episode.attempt + 1)] : null,
        ["Tokens", `${count(episode.tokens)}, ${count(episode.action_tokens)} of answers`],
        ["Duration", duration(episode.duration_s)],
        episode.sandboxes.length ? ["Sandbox", episode.sandboxes.flatMap(([host, sandbox], index) =>
          [index ? " → " : "", h("a", { href: link("sandboxes", { run, box: sandbox }), title: plain(host) }, line(sandbox, 60))])] : null,
        ...Object.entries(episode.metrics).map(([name, value]) => [line(name), number(value)]),
      ]),
      h("div", { class: "shares" }, share(episode.generate_s, "generation", "generation"), share(episode.env_s, "environment", "environment"), share(waiting, "waiting", "waiting")),
      h("div", { class: "legend" }, ["generation", "environment", "waiting"].map((kind, index) =>
        h("span", null, h("i", { class: `dot ${kind}` }), `${kind} ${duration([episode.generate_s, episode.env_s, waiting][index])}`))));
  }

  async drawGroup(run, episode) {
    const address = location.hash;
    this.body.replaceChildren(h("p", { class: "note" }, "Loading the group …"));
    const loaded = await Promise.all(episode.group.map((id) => this.load("episode", run, String(id)).catch(() => null)));
    if (address === location.hash) this.body.replaceChildren(...groupView(run, episode, loaded.filter(Boolean), episode.group.length));
  }

  async drawPictures(run, episode) {
    const address = location.hash;
    const nothing = (error) => ({ pictures: [], pages: 0, note: error.message });
    const { pictures, pages, note } = await this.load("drawings", run, String(episode.id)).catch(nothing);
    if (address !== location.hash) return;
    const drawn = (state, alt) => {
      if (pictures[state]) return h("img", { class: "picture", src: pictures[state], alt });
      return state < pages && h("iframe", { class: "picture", ...drawnPage(run, episode.id, state), title: alt, sandbox: "", loading: "lazy" });
    };
    this.body.querySelectorAll(".message.user").forEach((message, index) => message.prepend(drawn(index, `State before turn ${index + 1}`) || ""));
    const last = drawn(episode.turns.length, "Last state");
    if (last) this.body.append(h("article", { class: "turn" }, h("header", null, h("h2", null, "End")), h("div", { class: "message user" }, last)));
    if (note) this.body.querySelector(".replay").after(h("p", { class: "note" }, safe(note)));
  }

  turnTo(part) {
    change({ part });
    this.address = null;
    this.show();
  }

  keys() {
    const open = (id) => id !== null && go("episode", { run: this.run, id, part: route().params.get("part") });
    return {
      n: () => open(this.after), p: () => open(this.before), j: () => this.turn(1), k: () => this.turn(-1),
      ...(this.tokens ? { ArrowRight: () => this.tokens.move(1), ArrowLeft: () => this.tokens.move(-1) } : {}),
      1: () => this.turnTo(""), 2: () => this.turnTo("tokens"), 3: () => this.turnTo("group"),
    };
  }

  turn(by) {
    const turns = [...this.root.querySelectorAll("article.turn")];
    const above = turns.filter((turn) => turn.getBoundingClientRect().top < UNDER_HEADER).length;
    turns[Math.max(0, Math.min(turns.length - 1, above - 1 + by))]?.scrollIntoView({ block: "start" });
  }

  recolour() {
    this.tokens?.recolour();
  }

  destroy() {
    this.tokens?.destroy();
  }
}

/** Widths in proportion to seconds; factors below 1 in all would leave space. */
function grow(seconds) {
  return { "flex-grow": String(1e6 * Math.max(seconds ?? 0, 0)) };
}

function conversation(episode) {
  const system = episode.system ? [h("details", { class: "message system" }, h("summary", null, "System message"), block(episode.system))] : [];
  const longest = Math.max(...episode.turns.map((turn) => turn.generate_s + turn.env_s), 1e-9);
  const turns = episode.turns.map((turn, index) => h("article", { class: "turn", id: `turn-${index + 1}` },
    h("header", null, h("h2", null, `Turn ${index + 1}`),
      h("span", { class: `reward ${turn.reward > 0 ? "good" : turn.reward < 0 ? "bad" : ""}` }, `reward ${number(turn.reward)}`),
      turn.valid ? null : badge("invalid", "failed"),
      turn.finish_reason === "stop" ? null : badge(`ended by ${turn.finish_reason}`, "stopped"),
      h("div", { class: "spring" }),
      h("small", null, `${duration(turn.generate_s)} generation, ${duration(turn.env_s)} environment`),
      h("div", { class: "shares small", style: { width: `${Math.max(2, 120 * (turn.generate_s + turn.env_s) / longest)}px` } },
        h("div", { class: "generation", style: grow(turn.generate_s) }), h("div", { class: "environment", style: grow(turn.env_s) }))),
    h("div", { class: "message user" }, h("h3", null, "Observation"), block(turn.observation)),
    h("div", { class: "message assistant" }, h("h3", null, "Answer"), block(turn.response),
      h("p", { class: "actions" }, turn.actions.length ? ["executed", ...turn.actions.map((action) => h("code", null, line(action, 300)))] : "no action: the format was invalid"))));
  return [...system, ...turns, episode.turns.length ? null : h("p", { class: "empty" }, "The episode has no turn.")].filter(Boolean);
}
