// Answers to questions, from the server or from the files of a static copy (see agentkit/dashboard/answers.py).

const copy = globalThis.agentkitCopy;

export const isCopy = Boolean(copy);

export async function ask(question, asked = {}) {
  return copy ? fromCopy(question, asked) : fromServer(question, asked);
}

async function fromServer(question, asked) {
  const query = new URLSearchParams(Object.entries(asked).filter(([, value]) => value !== null && value !== undefined));
  const response = await fetch(`api/${question}?${query}`, { cache: "no-store" });
  if (response.status === 401 || response.status === 403) throw new Error(await response.text());
  const answer = await response.json();
  if (!response.ok) throw new Error(answer.error);
  return answer;
}

/** The address of a page that the environment draws of a state. */
export function drawnPage(run, id, state) {
  return copy ? `${copy.folders[run]}/page-${id}-${state}.html` : `page?${new URLSearchParams({ run, id, state })}`;
}

// A page that was opened from a file may not fetch others, but it may load scripts.
function fromCopy(question, asked) {
  if (asked.run !== undefined && !Object.hasOwn(copy.folders, asked.run)) return Promise.reject(new Error("This copy does not contain the run."));
  if (asked.id !== undefined && !/^\d+$/.test(asked.id)) return Promise.reject(new Error("There is no such episode."));
  const folder = asked.run === undefined ? "data" : copy.folders[asked.run];
  const name = `${folder}/${question}${asked.id === undefined ? "" : `-${asked.id}`}.js`;
  if (copy.answers[name] !== undefined) return Promise.resolve(copy.answers[name]);
  return new Promise((resolve, reject) => {
    const script = document.createElement("script");
    script.src = name;
    script.onload = () => resolve(copy.answers[name]);
    script.onerror = () => reject(new Error("This copy does not contain it; export more with --episodes."));
    document.head.append(script);
  });
}
