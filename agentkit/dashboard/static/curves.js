// Arithmetic of curves: smoothing, and several runs as one band.

/** Exponential moving average without the bias of its start; gaps stay gaps. */
export function smoothed(values, weight) {
  if (!weight) return values;
  let sum = 0;
  let norm = 0;
  return values.map((value) => {
    if (value === null || value === undefined) return value;
    sum = weight * sum + (1 - weight) * value;
    norm = weight * norm + (1 - weight);
    return sum / norm;
  });
}

/** Tables [x, y] on common x. */
export function joined(tables) {
  const xs = [...new Set(tables.flatMap(([x]) => x))].sort((a, b) => a - b);
  const place = new Map(xs.map((x, index) => [x, index]));
  return [xs, ...tables.map(([x, y]) => {
    const column = new Array(xs.length).fill(null);
    x.forEach((one, index) => { column[place.get(one)] = y[index] ?? null; });
    return column;
  })];
}

/** Mean, smallest and largest of columns at each row; null where all are missing. */
export function band(columns) {
  const rows = columns[0]?.length ?? 0;
  const [mean, low, high] = [[], [], []];
  for (let row = 0; row < rows; row++) {
    const present = columns.map((column) => column[row]).filter((value) => value !== null && value !== undefined);
    mean.push(present.length ? present.reduce((a, b) => a + b) / present.length : null);
    low.push(present.length ? Math.min(...present) : null);
    high.push(present.length ? Math.max(...present) : null);
  }
  return { mean, low, high };
}

/** Names that contain the search; it is a regular expression if it is a valid one. */
export function matching(names, search) {
  if (!search) return names;
  let test;
  try {
    const pattern = new RegExp(search, "i");
    test = (name) => pattern.test(name);
  } catch {
    test = (name) => name.toLowerCase().includes(search.toLowerCase());
  }
  return names.filter(test);
}
