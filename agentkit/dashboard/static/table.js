// The table of episodes: columns as arrays, filtered and sorted as lists of row numbers.

import { ask, isCopy } from "./data.js";

const tables = new Map();
const NUMBERS = ["id", "step", "group_id", "member", "seed", "version_started", "staleness", "reward", "turns", "tokens",
  "action_tokens", "duration_s", "generate_s", "env_s"];

/** Columns of a run's episodes; a second call loads only new ones. Returns {columns, length, changed}. */
export async function loadTable(run) {
  const known = tables.get(run);
  if (known && isCopy) return { ...known, changed: false };
  const columns = known?.columns;
  const answer = await ask("episodes", { run, after: columns?.id.at(-1) ?? 0, at: known?.at, count: columns?.id.length ?? 0 });
  const fresh = answer.columns;
  fresh.staleness = fresh.ending.map((ending, row) =>
    (ending === "trained" || fresh.ending_reason[row] === "stale" ? fresh.step[row] - 1 - fresh.version_started[row] : null));
  const changed = fresh.id.length > 0 || answer.after === 0;
  let merged = fresh;
  if (answer.after && columns) {
    merged = columns;
    if (fresh.id.length) merged = Object.fromEntries(Object.keys(columns).map((name) => [name, columns[name].concat(fresh[name])]));
  }
  const table = { columns: merged, length: merged.id.length, at: answer.last_at };
  tables.set(run, table);
  return { ...table, changed };
}

/** Row numbers that meet all conditions. Conditions: the parameters of the address. */
export function filtered(columns, params) {
  const tests = [];
  const equal = (name, column = name) => {
    const wanted = params.get(name);
    if (wanted) tests.push((row) => String(columns[column][row]) === wanted);
  };
  ["ending", "outcome", "env_id", "seed", "group_id", "success"].forEach((name) => equal(name));
  const error = params.get("error")?.toLowerCase();
  if (error) tests.push((row) => columns.reason[row].toLowerCase().includes(error) || columns.ending_reason[row].toLowerCase().includes(error));
  for (const name of ["step", "reward", "staleness", "turns", "tokens", "duration_s"]) {
    const range = interval(params.get(name));
    if (!range) continue;
    const column = columns[name];
    tests.push((row) => column[row] !== null && column[row] >= range[0] && column[row] <= range[1]);
  }
  const rows = [];
  for (let row = 0; row < columns.id.length; row++) {
    if (tests.every((test) => test(row))) rows.push(row);
  }
  return rows;
}

/** "3", "3..7", "3.." and "..7" as [smallest, largest]; null for anything else. */
export function interval(text) {
  const match = /^\s*(-?[\d.]*?)\s*(?:(\.\.)\s*(-?[\d.]*))?\s*$/.exec(text ?? "");
  if (!match || (!match[1] && !match[3])) return null;
  const low = match[1] ? Number(match[1]) : -Infinity;
  const high = match[2] ? (match[3] ? Number(match[3]) : Infinity) : low;
  return Number.isNaN(low) || Number.isNaN(high) ? null : [low, high];
}

/** Sort row numbers in place: missing values last, equal ones in the order of recording. */
export function sorted(columns, rows, name, descending) {
  if (name === "id") return descending ? rows.reverse() : rows; // as they were recorded
  const column = columns[name];
  const sign = descending ? -1 : 1;
  const numeric = NUMBERS.includes(name);
  return rows.sort((a, b) => {
    const [x, y] = [column[a], column[b]];
    if (x === y) return (a - b) * sign;
    if (x === null) return 1;
    if (y === null) return -1;
    return sign * (numeric ? x - y : x < y ? -1 : 1);
  });
}

export function distinct(column) {
  return [...new Set(column)].sort();
}
