// Elements and formats. Text reaches the page only as text nodes, with its control characters made visible.

// As agentkit.text.printable: control characters except tab and line ends, direction marks, lone surrogates.
const UNSAFE =
  /\r(?!\n)|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\u2028\u2029\ud800-\udfff]/gu;
const LONGEST_TEXT = 20000; // characters

/** Make an element. Properties that begin with "on" are listeners; null children are left out. */
export function h(tag, properties, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") Object.entries(value).forEach(([key, one]) => element.style.setProperty(key, one));
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** Nodes of a text in which every unsafe character is a visible escape. */
export function safe(text) {
  const nodes = [];
  let start = 0;
  for (const match of text.matchAll(UNSAFE)) {
    const code = match[0].charCodeAt(0);
    const digits = code.toString(16);
    nodes.push(text.slice(start, match.index));
    nodes.push(h("span", { class: "escape" }, code < 256 ? `\\x${digits.padStart(2, "0")}` : `\\u${digits.padStart(4, "0")}`));
    start = match.index + match[0].length;
  }
  nodes.push(text.slice(start));
  return nodes;
}

/** A block of text of unknown origin and length. */
export function block(text, className = "") {
  if (text.length <= LONGEST_TEXT) return h("pre", { class: className }, safe(text));
  const pre = h("pre", { class: className }, safe(text.slice(0, LONGEST_TEXT)));
  const more = h("button", { class: "more" }, `Show all ${count(text.length)} characters`);
  more.addEventListener("click", () => {
    pre.replaceChildren(...chunks(text).map((chunk) => h("div", { class: "chunk" }, safe(chunk))));
    more.remove();
  });
  return h("div", null, pre, more);
}

/** Parts of a long text, which the browser lays out only when they are in view; they end at a line end if possible. */
function chunks(text) {
  const parts = [];
  for (let start = 0; start < text.length;) {
    const line = text.lastIndexOf("\n", start + LONGEST_TEXT) + 1;
    let end = line > start ? line : start + LONGEST_TEXT;
    if (/[\ud800-\udbff]/.test(text[end - 1])) end += 1; // do not divide a pair
    parts.push(text.slice(start, end));
    start = end;
  }
  return parts;
}

/** One line of text of unknown origin. */
export function line(text, longest = 200) {
  const short = text.length > longest ? `${text.slice(0, longest)}…` : text;
  return h("bdi", null, safe(short.replace(/\s+/g, " ")));
}

/** A text of unknown origin as the value of an attribute. */
export function plain(text) {
  return safe(text).map((node) => node.textContent ?? node).join("");
}

export function count(value) {
  return value === null || value === undefined ? "–" : Math.round(value).toLocaleString("en");
}

/** A number in at most six characters, such as 1.85 M. */
export function short(value) {
  if (value === null || value === undefined) return "–";
  for (const [size, unit] of [[1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (Math.abs(value) >= size) return `${(value / (unit === "k" ? 1e3 : size)).toPrecision(3)} ${unit}`;
  }
  return Number.isInteger(value) ? value.toLocaleString("en") : number(value);
}

export function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-3) return value.toExponential(2);
  return String(Number(value.toPrecision(4)));
}

export function percent(value, digits = 1) {
  return value === null || value === undefined ? "–" : `${(100 * value).toFixed(digits)} %`;
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 1) return `${Math.round(1000 * seconds)} ms`;
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  const whole = Math.round(seconds);
  if (whole < 60) return `${whole} s`;
  const [days, hours, minutes] = [Math.floor(whole / 86400), Math.floor(whole / 3600) % 24, Math.floor(whole / 60) % 60];
  if (days) return `${days} d ${hours} h`;
  return hours ? `${hours} h ${minutes} min` : `${minutes} min ${whole % 60} s`;
}

export function ago(seconds) {
  return seconds === null ? "–" : `${duration(Math.max(1, Date.now() / 1000 - seconds))} ago`;
}

/** A list to choose from; "" chooses everything. */
export function choice(label, value, options, onchange) {
  const select = h("select", { "aria-label": label, onchange: () => onchange(select.value) },
    options.map(([option, text]) => h("option", { value: option, selected: option === value }, text)));
  return h("label", { class: "field" }, h("span", null, label), select);
}

export function field(label, value, properties, oninput) {
  const input = h("input", { value: value ?? "", "aria-label": label, ...properties, oninput: () => oninput(input.value) });
  return h("label", { class: "field" }, h("span", null, label), input);
}

export function facts(pairs) {
  return h("dl", { class: "facts" }, pairs.filter(Boolean).map(([name, value]) =>
    h("div", null, h("dt", null, name), h("dd", null, value))));
}

export function badge(text, kind = text) {
  return h("span", { class: `badge ${kind.replace(/[^a-z_]/g, "")}` }, safe(text));
}

/** A text for screen readers only. */
export function unseen(text) {
  return h("span", { class: "unseen" }, text);
}

/** A table. Cells: [content, class]. */
export function grid(names, rows) {
  return h("div", { class: "scroll free", tabindex: 0 }, h("table", { class: "grid" },
    h("thead", null, h("tr", null, names.map((name, index) => h("th", { scope: "col", class: rows[0]?.[index]?.[1] === "num" ? "num" : null }, name)))),
    h("tbody", null, rows.map((cells) => h("tr", null, cells.map(([content, kind]) => h("td", { class: kind ?? null }, content)))))));
}
