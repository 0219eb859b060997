// The state of the page is its address: #/view?name=value&…

import { contains } from "./data.js";

export function route() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  return { view: path || "overview", params: new URLSearchParams(query) };
}

/** The address of a view; null if this page does not contain it. */
export function link(view, values) {
  if (!contains(view, values)) return null;
  const params = new URLSearchParams();
  for (const [name, value] of Object.entries(values ?? {})) {
    for (const one of Array.isArray(value) ? value : [value]) {
      if (one !== null && one !== undefined && one !== "") params.append(name, one);
    }
  }
  const query = params.toString();
  return `#/${view}${query ? `?${query}` : ""}`;
}

export function go(view, values) {
  const address = link(view, values);
  if (address !== null) location.hash = address;
}

/** Change values of the current view without a step in the history; null and "" remove one. */
export function change(values) {
  const { view, params } = route();
  for (const [name, value] of Object.entries(values)) {
    params.delete(name);
    for (const one of Array.isArray(value) ? value : [value]) {
      if (one !== null && one !== undefined && one !== "") params.append(name, one);
    }
  }
  const query = params.toString();
  history.replaceState(null, "", `#/${view}${query ? `?${query}` : ""}`);
}

/** The run that the address names, or else the one that was updated last; undefined if there is none. */
export function shownRun(runs) {
  const named = runs.find((run) => run.name === route().params.get("run"));
  const readable = runs.filter((run) => run.status !== "unreadable");
  return named ?? readable.sort((a, b) => (b.updated ?? 0) - (a.updated ?? 0))[0] ?? runs[0];
}
