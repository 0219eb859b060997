// The members of a group side by side, with the first difference of each from the shown one.

import { badge, block, h, line, number } from "./dom.js";
import { link } from "./state.js";

/** Index of the first turn that differs, and of the first character of its answer; null if all are equal. */
export function firstDifference(one, other) {
  const turns = Math.max(one.turns.length, other.turns.length);
  for (let turn = 0; turn < turns; turn++) {
    const [a, b] = [one.turns[turn], other.turns[turn]];
    if (!a || !b) return { turn, part: "answer", at: 0 };
    for (const [part, name] of [["observation", "observation"], ["answer", "response"]]) {
      if (a[name] === b[name]) continue;
      let at = 0;
      while (at < a[name].length && a[name][at] === b[name][at]) at++;
      return { turn, part, at };
    }
  }
  return null;
}

export function groupView(run, shown, members, expected) {
  const rewards = new Set(members.filter((member) => member.outcome !== "voided").map((member) => member.reward));
  const notes = [];
  if (members.length > 1 && rewards.size === 1) notes.push("All returns are equal, so group-relative advantages are zero.");
  if (members.length < expected) notes.push(`${expected - members.length} members are not in this copy.`);
  return [
    h("p", { class: "note" }, notes.length ? notes.join(" ") : `Marked: the first difference from episode ${shown.id}.`),
    h("div", { class: "columns" }, members.map((member) => column(run, shown, member))),
  ];
}

function column(run, shown, member) {
  const self = member.id === shown.id;
  const difference = self ? null : firstDifference(shown, member);
  const where = self ? "this episode" : difference ? `differs from turn ${difference.turn + 1}` : "no difference";
  return h("section", { class: self ? "member self" : "member" },
    h("header", null,
      h("a", { href: link("episode", { run, id: member.id, part: "group" }) }, `Member ${member.member}`, member.attempt ? `, attempt ${member.attempt + 1}` : ""),
      h("span", { class: `reward ${member.reward > 0 ? "good" : member.reward < 0 ? "bad" : ""}` }, number(member.reward)),
      badge(member.ending),
      h("small", null, `${member.turns.length} turns · ${member.outcome} · ${where}`)),
    member.turns.map((turn, index) => {
      const here = difference?.turn === index;
      return h("div", { class: here ? "turn different" : difference && index > difference.turn ? "turn after" : "turn" },
        h("h3", null, `Turn ${index + 1}`, turn.reward ? h("span", { class: `reward ${turn.reward > 0 ? "good" : "bad"}` }, number(turn.reward)) : null),
        here && difference.part === "observation" ? marked(turn.observation, difference.at) : block(turn.observation, "observation"),
        here && difference.part === "answer" ? marked(turn.response, difference.at) : block(turn.response, "answer"));
    }),
    member.turns.length ? null : h("p", { class: "note" }, line(member.reason || "no turn", 400)));
}

function marked(text, at) {
  const pre = block(text.slice(0, at), "answer");
  const rest = block(text.slice(at) || "∅", "answer");
  return h("div", { class: "split" }, pre, h("mark", { title: "first difference" }, rest));
}
