// Charts of one run, each with its legend.

import { COLOURS, Chart } from "./chart.js";
import { h, line, plain } from "./dom.js";

export class Cards {
  /** onpick is called with the step of a point that is clicked. */
  constructor(titles, onpick) {
    this.cards = new Map(titles.map((title) => [title, { chart: new Chart(title, (run, step) => onpick(step)), legend: h("div", { class: "legend" }) }]));
    this.element = h("div", { class: "cards" }, [...this.cards.values()].map(({ chart, legend }) => {
      chart.element.append(legend);
      return chart.element;
    }));
  }

  /** Lines: [label, values]. Those without a value are left out; a chart without a line is hidden. unit: of the steps. */
  draw(title, run, steps, lines, unit = "step") {
    const { chart, legend } = this.cards.get(title);
    const shown = lines.filter(([, values]) => values?.some((value) => value !== null && value !== undefined))
      .map(([label, values], index) => ({ label: plain(label), run, values, colour: COLOURS[index % COLOURS.length] }));
    chart.element.hidden = !shown.length;
    if (shown.length) chart.draw(steps, shown, unit);
    legend.replaceChildren(...shown.map((one) => h("span", null, h("i", { class: "dot", style: { background: one.colour } }), line(one.label))));
  }

  recolour() {
    this.cards.forEach(({ chart }) => chart.recolour());
  }

  destroy() {
    this.cards.forEach(({ chart }) => chart.destroy());
  }
}
