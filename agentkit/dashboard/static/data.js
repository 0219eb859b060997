// Answers to questions, from the server or from the files of a static copy (see agentkit/dashboard/answers.py).

const copy = globalThis.agentkitCopy;

export const isCopy = Boolean(copy);

/** Run and id of the episode of a page with one episode; undefined on others. */
export const onlyEpisode = copy?.only;

/** Whether this page can show a view. */
export function contains(view, { id } = {}) {
  return !onlyEpisode || (view === "episode" && copy.answers[answerName("episode", { run: onlyEpisode.run, id })] !== undefined);
}

export async function ask(question, asked = {}) {
  return copy ? fromCopy(question, asked) : fromServer(question, asked);
}

/** Let the server do something; a copy has none. */
export async function command(name, asked) {
  if (copy) throw new Error("This is a copy: it needs the server, `agentkit dashboard`.");
  return fromServer(name, asked, "POST");
}

async function fromServer(question, asked, method = "GET") {
  const query = new URLSearchParams(Object.entries(asked).filter(([, value]) => value !== null && value !== undefined));
  const response = await fetch(`api/${question}?${query}`, { cache: "no-store", method });
  if (response.status === 401 || response.status === 403) throw new Error(await response.text());
  const answer = await response.json();
  if (!response.ok) throw new Error(answer.error);
  return answer;
}

/** A page that the environment draws of a state, as attributes of its frame. */
export function drawnPage(run, id, state) {
  if (!copy) return { src: `page?${new URLSearchParams({ run, id, state })}` };
  const name = `${copy.folders[run]}/page-${id}-${state}.html`;
  return copy.pages ? { srcdoc: copy.pages[name] } : { src: name };
}

function answerName(question, { run, id }) {
  const folder = run === undefined ? "data" : copy.folders[run];
  return `${folder}/${question}${id === undefined ? "" : `-${id}`}.js`;
}

// A page that was opened from a file may not fetch others, but it may load scripts.
function fromCopy(question, asked) {
  if (asked.run !== undefined && !Object.hasOwn(copy.folders, asked.run)) return Promise.reject(new Error("This copy does not contain the run."));
  if (asked.id !== undefined && !/^\d+$/.test(asked.id)) return Promise.reject(new Error("There is no such episode."));
  const name = answerName(question, asked);
  if (copy.answers[name] !== undefined) return Promise.resolve(copy.answers[name]);
  if (onlyEpisode) return Promise.reject(new Error("This page does not contain it."));
  return new Promise((resolve, reject) => {
    const script = document.createElement("script");
    script.src = name;
    script.onload = () => resolve(copy.answers[name]);
    script.onerror = () => reject(new Error("This copy does not contain it; export more with --episodes."));
    document.head.append(script);
  });
}
