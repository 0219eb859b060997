// An episode token by token: log-probability, version, mask, and what the learner gave each.

import { COLOURS, Chart } from "./chart.js";
import { ask, isCopy } from "./data.js";
import { choice, facts, h, number, percent, safe } from "./dom.js";
import { change, route } from "./state.js";

const MEASURES = [["logprob", "log-probability"], ["version", "policy version"], ["advantage", "advantage"], ["weight", "mask of the loss"], ["none", "no colour"]];
const GIVEN = [["value", "value of the critics"], ["disagreement", "disagreement of the critics"], ["waad", "WAAD: how far back it looks"],
  ["fai", "FAI: how much later tokens look at it"], ["factor", "factor of the credit"]];
const PAGE = 20000;
const LARGEST = 5;

export class TokenView {
  constructor(root, run, episode, credit) {
    this.run = run;
    this.episode = episode;
    this.tokens = tokensOf(episode, credit);
    this.acted = this.tokens.filter((token) => token.action);
    this.detail = h("div", { class: "panel detail", role: "status" }, h("p", { class: "note" }, "Point at a token, or move with ← and →."));
    this.text = h("div", { class: "tokens" });
    this.text.addEventListener("mouseover", (event) => this.tell(event.target));
    this.legend = h("div", { class: "legend" });
    this.colours = h("span", null);
    this.note = h("p", { class: "note", role: "status" }, safe(credit.note));
    this.button = isCopy ? null : h("button", { title: "Attention rhythm, and values of critics", onclick: () => { change({ read: 1 }); this.read(); } }, "Read with the newest checkpoint");
    const prompts = h("input", { type: "checkbox", checked: route().params.get("prompts") !== "hidden",
      onchange: () => { change({ prompts: prompts.checked ? "" : "hidden" }); this.draw(); } });
    const bar = h("div", { class: "bar tools" },
      this.colours,
      h("label", { class: "field check" }, prompts, h("span", null, "Prompts and observations")), ...(this.button ? [this.button] : []), this.legend);
    this.chart = new Chart("log-probability of answer tokens", null);
    this.largest = h("div", { class: "panel largest" });
    root.replaceChildren(bar, this.note, h("div", { class: "twin" }, this.text, h("aside", null, this.detail, this.largest, this.chart.element)));
    this.draw();
    requestAnimationFrame(() => this.drawChart());
    if (route().params.get("read") && !isCopy) this.read();
  }

  async read() {
    const say = (text) => { this.note.textContent = text; };
    say("Reading the episode with the newest checkpoint …");
    this.button.disabled = true;
    try {
      const found = await ask("readings", { run: this.run, id: this.episode.id });
      this.acted.forEach((token, place) => Object.assign(token, given(found, place)));
      this.button.remove();
      say(`Read with the checkpoint of step ${found.step}. ${found.note}`);
      this.draw();
      this.drawChart();
    } catch (error) {
      say(error.message);
      this.button.disabled = false;
    }
  }

  draw() {
    const measure = route().params.get("colour") ?? "logprob";
    const known = GIVEN.filter(([name]) => this.acted.some((token) => present(token[name])));
    this.colours.replaceChildren(choice("Colour", measure, [...MEASURES.slice(0, -1), ...known, MEASURES.at(-1)], (colour) => { change({ colour }); this.draw(); this.drawChart(); }));
    const hidden = route().params.get("prompts") === "hidden";
    const colour = scale(measure, this.acted);
    const nodes = [];
    let turn = -1;
    const shown = this.tokens.filter((token) => token.action || !hidden);
    for (const token of shown.slice(0, this.limit ?? PAGE)) {
      if (token.turn !== turn) {
        turn = token.turn;
        nodes.push(h("h2", { class: "turn" }, turn < this.episode.turns.length ? `Turn ${turn + 1}` : "Last observation"));
      }
      const background = token.action ? colour(token) : null;
      nodes.push(h("span", { class: token.action ? "token" : "token prompt", "data-index": token.index, style: background ? { background } : null }, pieces(token.text)));
      if (token.text.includes("\n")) nodes.push(h("br"));
    }
    if (shown.length > (this.limit ?? PAGE)) {
      nodes.push(h("button", { class: "more", onclick: () => { this.limit = Infinity; this.draw(); } }, `Show all ${shown.length} tokens`));
    }
    this.text.replaceChildren(...nodes);
    this.legend.replaceChildren(...legendOf(measure, this.acted, colour));
    this.drawLargest(measure);
  }

  /** The answer tokens with the largest values of the measure, of credit without its sign. */
  drawLargest(measure) {
    const titles = { logprob: "Least likely tokens", advantage: "Largest credit" };
    const size = { logprob: (token) => -token.logprob, advantage: (token) => Math.abs(token.advantage * (token.weight ?? 1)) }[measure] ?? ((token) => token[measure]);
    const known = ["version", "weight", "none"].includes(measure) ? [] : this.acted.filter((token) => present(token[measure]));
    const ordered = [...known].sort((a, b) => size(b) - size(a) || a.index - b.index);
    const equal = ordered.length && size(ordered[0]) === size(ordered.at(-1));
    this.largest.hidden = !ordered.length;
    this.largest.replaceChildren(
      h("h2", null, titles[measure] ?? `Largest: ${nameOf(measure)}`),
      equal ? h("p", { class: "note" }, `All ${ordered.length} answer tokens have ${number(ordered[0][measure])}.`)
        : h("ol", null, ordered.slice(0, LARGEST).map((token) => h("li", null,
          h("button", { onclick: () => this.find(token.index) }, h("code", null, pieces(token.text))), ` ${number(token[measure])}, turn ${token.turn + 1}`))));
  }

  /** Show a token, also one that is not drawn yet. */
  find(index) {
    if (!this.text.querySelector(`[data-index="${index}"]`)) {
      this.limit = Infinity;
      this.draw();
    }
    const element = this.text.querySelector(`[data-index="${index}"]`);
    this.tell(element);
    element.scrollIntoView({ block: "center" });
  }

  drawChart() {
    const measure = route().params.get("colour") ?? "logprob";
    const shown = this.acted.some((token) => present(token[measure])) ? measure : "logprob";
    const label = nameOf(shown);
    this.chart.element.querySelector("figcaption").textContent = `${label}, answer tokens`;
    const column = (of) => this.acted.map((token) => of(token) ?? null);
    const critics = shown === "value" && this.acted[0].values.length > 1 ? this.acted[0].values.map((_, index) => index) : [];
    const lines = critics.length
      ? critics.map((index) => ({ label: `critic ${index}`, colour: COLOURS[index % COLOURS.length], values: column((token) => token.values[index]) }))
      : [{ label, colour: COLOURS[0], values: column((token) => token[shown]) }];
    this.chart.draw(this.acted.map((_, index) => index + 1), lines, "answer token");
  }

  tell(target) {
    const token = this.tokens[target.closest?.(".token")?.dataset.index];
    if (!token) return;
    this.detail.replaceChildren(
      h("p", { class: "big" }, h("code", null, pieces(token.text))),
      facts([
        ["Id", String(token.id)], ["Turn", String(token.turn + 1)], ["Position", String(token.index)],
        ["Masked", token.action ? "no: an answer" : "yes: a prompt or an observation"],
        token.action ? ["Log-probability", `${number(token.logprob)} (${percent(Math.exp(token.logprob))})`] : null,
        token.action ? ["Version", String(token.version)] : null,
        present(token.advantage) ? ["Advantage", number(token.advantage)] : null,
        present(token.weight) ? ["Weight in the loss", number(token.weight)] : null,
        token.values?.length ? [token.values.length > 1 ? "Values of the critics" : "Value", token.values.map(number).join(", ")] : null,
        present(token.disagreement) ? ["Disagreement", number(token.disagreement)] : null,
        present(token.waad) ? ["WAAD", number(token.waad)] : null,
        present(token.fai) ? ["FAI", number(token.fai)] : null,
        token.marks ? ["Marks", token.marks] : null,
        present(token.factor) ? ["Credit factor", number(token.factor)] : null,
      ]));
    this.text.querySelector(".here")?.classList.remove("here");
    target.closest(".token").classList.add("here");
    this.here = token.index;
  }

  move(by) {
    const shown = [...this.text.querySelectorAll(".token")];
    const now = shown.findIndex((element) => Number(element.dataset.index) === this.here);
    const next = shown[now < 0 ? 0 : Math.max(0, Math.min(shown.length - 1, now + by))];
    if (next) this.tell(next);
    next?.scrollIntoView({ block: "nearest" });
  }

  recolour() {
    this.chart.recolour();
    this.drawChart();
    this.draw();
  }

  destroy() {
    this.chart.destroy();
  }
}

/** All tokens in order. With a rendered-again history, each turn begins with its whole prompt. */
export function tokensOf(episode, credit) {
  const tokens = [];
  let acted = 0;
  const add = (id, turn, more) => tokens.push({ id, turn, index: tokens.length, text: episode.vocabulary?.[id] ?? `⟨${id}⟩`, action: false, ...more });
  episode.turns.forEach((turn, index) => {
    turn.prompt_ids.forEach((id) => add(id, index));
    const versions = turn.versions.flatMap(([version, length]) => new Array(length).fill(version));
    turn.action_ids.forEach((id, place) => {
      add(id, index, { action: true, logprob: turn.action_logprobs[place], version: versions[place],
        advantage: credit.advantages?.[acted], weight: credit.policy_weight?.[acted], ...given(credit, acted) });
      acted++;
    });
  });
  episode.final_ids.forEach((id) => add(id, episode.turns.length));
  return tokens;
}

/** What the learner, or the newest checkpoint, says about an answer token. */
function given(found, place) {
  const values = found.values.map((of) => of[place]);
  const mean = values.length ? values.reduce((a, b) => a + b) / values.length : undefined;
  return { values, value: mean, ...Object.fromEntries(["waad", "fai", "factor", "marks", "disagreement"].map((name) => [name, found[name]?.[place]])) };
}

function nameOf(measure) {
  return [...MEASURES, ...GIVEN].find(([name]) => name === measure)?.[1] ?? measure;
}

function pieces(text) {
  return safe(text.replace(/ /g, "·").replace(/\n/g, "↵").replace(/\t/g, "⇥"));
}

function present(value) {
  return value !== null && value !== undefined;
}

function scale(measure, acted) {
  if (GIVEN.some(([name]) => name === measure)) {
    const [low, high] = extremes(measure, acted);
    return (token) => (present(token[measure]) ? `rgb(122 91 214 / ${(0.05 + 0.6 * (token[measure] - low) / (high - low || 1)).toFixed(3)})` : null);
  }
  if (measure === "logprob") return (token) => `rgb(226 113 29 / ${Math.min(0.6, -token.logprob / 5).toFixed(3)})`;
  if (measure === "version") {
    const versions = [...new Set(acted.map((token) => token.version))].sort((a, b) => a - b);
    return (token) => `hsl(${Math.round((versions.indexOf(token.version) * 137.5 + 215) % 360)} 65% 55% / 0.35)`;
  }
  if (measure === "advantage") {
    const largest = Math.max(...acted.map((token) => Math.abs(token.advantage ?? 0)), 1e-9);
    return (token) => (!present(token.advantage) ? null
      : `rgb(${token.advantage > 0 ? "42 157 99" : "207 68 87"} / ${(0.6 * Math.abs(token.advantage) / largest).toFixed(3)})`);
  }
  if (measure === "weight") return (token) => (token.weight === 0 ? "rgb(100 120 138 / 0.45)" : null);
  return () => null;
}

function extremes(measure, acted) {
  const values = acted.map((token) => token[measure]).filter(present);
  return [Math.min(...values), Math.max(...values)];
}

function legendOf(measure, acted, colour) {
  const item = (background, text) => h("span", null, h("i", { class: "swatch", style: background ? { background } : null }), text);
  if (GIVEN.some(([name]) => name === measure)) return extremes(measure, acted).map((value) => item(colour({ [measure]: value }), number(value)));
  if (measure === "logprob") return [1, 0.5, 0.1, 0.05].map((p) => item(colour({ logprob: Math.log(p) }), `p = ${p}`));
  if (measure === "version") return [...new Set(acted.map((token) => token.version))].slice(0, 12).map((version) => item(colour({ version }), `version ${version}`));
  const known = acted.filter((token) => present(token.advantage));
  if (measure === "advantage") {
    if (!known.length) return [h("span", { class: "note" }, "unknown")];
    const values = [...new Set(known.map((token) => token.advantage))].sort((a, b) => a - b);
    const ends = values.length > 1 ? [values[0], values.at(-1)] : values;
    return ends.map((advantage) => item(colour({ advantage }), number(advantage)));
  }
  if (measure === "weight") return known.length ? [item(colour({ weight: 0 }), "no policy loss"), item(null, "policy loss")] : [h("span", { class: "note" }, "unknown")];
  return [];
}
