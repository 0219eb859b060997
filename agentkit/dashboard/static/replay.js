// Replay of an episode: its environment repeats the actions in a sandbox of the server (see agentkit/dashboard/replay.py).

import { command, isCopy } from "./data.js";
import { badge, block, count, duration, h, safe } from "./dom.js";

/** A panel with the button that starts a replay, and its result. */
export function replayPanel(run, episode) {
  const said = h("div", { class: "said", role: "status" });
  const button = h("button", { disabled: isCopy || !episode.turns.length, onclick: () => start() }, "Replay in a sandbox");
  const say = (...nodes) => said.replaceChildren(...nodes.filter(Boolean));
  const note = (text) => h("p", { class: "note" }, safe(text));

  async function start() {
    button.disabled = true;
    say(note("The environment repeats the actions …"));
    try {
      say(...result(await command("replay", { run, id: episode.id })));
    } catch (error) {
      say(h("p", { class: "wrong" }, safe(error.message)));
    }
    button.disabled = false;
  }

  if (isCopy) say(note("A replay needs the server: open the run with `agentkit dashboard`."));
  return h("section", { class: "replay" }, button, said);
}

function result({ turns, difference, sandbox, seconds, note }) {
  const where = h("small", null, `${sandbox} sandbox, ${duration(seconds)}`);
  const more = note ? h("p", { class: "note" }, safe(note)) : null;
  if (!difference) {
    const text = `${count(turns)} ${turns === 1 ? "turn" : "turns"} gave the recorded observations, rewards and ending`;
    return [h("p", null, badge("identical", "finished"), ` ${text} `, where), more];
  }
  const side = (title, text) => h("div", null, h("h3", null, title), block(text));
  return [
    h("p", null, badge("differs", "failed"), " ", `turn ${count(difference.turn)}: ${difference.what} `, where), more,
    h("div", { class: "sides" }, side("Recorded", difference.recorded), side("Replayed", difference.replayed)),
  ];
}
