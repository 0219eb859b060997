// One chart of lines and bands, drawn by uPlot.

import { h, number } from "./dom.js";

const HEIGHT = 210;

export const COLOURS = ["#3b6fe0", "#e2711d", "#2a9d63", "#b5479e", "#7a5bd6", "#b8901f", "#1593ab", "#cf4457", "#64788a", "#6a8f1c"];

/** Lines: {label, colour, values, faint, low, high, points}; low and high are the edges of a band. */
export class Chart {
  constructor(title, onpick) {
    this.onpick = onpick;
    this.readout = h("div", { class: "readout" });
    this.place = h("div", { class: "plot" });
    this.element = h("figure", { class: "chart" }, h("figcaption", { title }, title), this.readout, this.place);
    this.observer = new ResizeObserver(() => this.resize());
    this.observer.observe(this.place);
  }

  draw(xs, lines, xLabel) {
    this.lines = lines;
    const data = [xs];
    const series = [{}];
    const bands = [];
    this.shown = [];
    for (const one of lines) {
      if (one.low) {
        data.push(one.high, one.low);
        series.push(edge(), edge());
        bands.push({ series: [data.length - 2, data.length - 1], fill: `${one.colour}26` });
      }
      if (one.faint) {
        data.push(one.faint);
        series.push({ stroke: `${one.colour}40`, width: 1, points: { show: false }, spanGaps: true });
      }
      data.push(one.values);
      const few = one.values.filter((value) => value !== null && value !== undefined).length < 16;
      series.push({ stroke: one.colour, width: 1.75, spanGaps: true, points: { show: few, size: 5, fill: one.colour } });
      this.shown.push([one, data.length - 1]);
    }
    const key = JSON.stringify([series, bands, xLabel]);
    if (this.plot && key === this.key) {
      const zoomed = this.zoomed;
      this.plot.setData(data, !zoomed);
      return;
    }
    this.key = key;
    this.xLabel = xLabel;
    this.plot?.destroy();
    this.plot = new uPlot(this.options(series, bands), data, this.place);
  }

  options(series, bands) {
    const style = getComputedStyle(document.documentElement);
    const [text, grid] = [style.getPropertyValue("--muted").trim(), style.getPropertyValue("--grid").trim()];
    const font = "11px system-ui, sans-serif";
    const axis = { stroke: text, font, grid: { stroke: grid, width: 1 }, ticks: { stroke: grid, width: 1, size: 4 } };
    return {
      width: Math.max(this.place.clientWidth, 120), height: HEIGHT, series, bands, legend: { show: false },
      scales: { x: { time: false } },
      axes: [
        { ...axis, size: 28, gap: 2 },
        { ...axis, size: 52, gap: 4, values: (_, splits) => splits.map((value) => (value === null ? "" : number(value))) },
      ],
      cursor: { sync: { key: "charts" }, points: { size: 6 }, drag: { x: true, y: false } },
      hooks: {
        setCursor: [(plot) => this.tell(plot)],
        setScale: [(plot, scale) => { if (scale === "x") this.zoomed = plot.scales.x.min > plot.data[0][0] || plot.scales.x.max < plot.data[0].at(-1); }],
        ready: [(plot) => plot.over.addEventListener("click", () => this.pick(plot))],
      },
    };
  }

  tell(plot) {
    const index = plot.cursor.idx;
    if (index === null || index === undefined || plot.cursor.left < 0) {
      this.readout.replaceChildren();
      return;
    }
    const x = plot.data[0][index];
    const values = this.shown.map(([one, place]) => [one, plot.data[place][index]]).filter(([, value]) => value !== null && value !== undefined);
    this.readout.replaceChildren(
      h("span", { class: "at" }, `${this.xLabel} ${number(x)}`),
      ...values.slice(0, 6).map(([one, value]) => h("span", { title: one.label },
        h("i", { class: "dot", style: { background: one.colour } }), one.interval ? `${number(value)} ${one.interval[index] ?? ""}` : number(value))),
    );
  }

  pick(plot) {
    const index = plot.cursor.idx;
    if (!this.onpick || index === null || index === undefined || plot.select.width > 2) return;
    const near = this.shown
      .filter(([one, place]) => one.run && plot.data[place][index] !== null && plot.data[place][index] !== undefined)
      .map(([one, place]) => [Math.abs(plot.valToPos(plot.data[place][index], "y") - plot.cursor.top), one])
      .sort((a, b) => a[0] - b[0])[0];
    if (near && near[0] < 14) this.onpick(near[1].run, plot.data[0][index]);
  }

  resize() {
    if (this.plot && this.place.clientWidth > 0) this.plot.setSize({ width: this.place.clientWidth, height: HEIGHT });
  }

  recolour() {
    this.key = null;
  }

  destroy() {
    this.observer.disconnect();
    this.plot?.destroy();
  }
}

function edge() {
  return { stroke: "transparent", width: 0, points: { show: false }, spanGaps: true };
}
