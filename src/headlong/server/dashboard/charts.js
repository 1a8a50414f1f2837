/** Two small charts in SVG: lines over the last two minutes, and bars per draft position. Know no statistics. */

import { el, svg } from "./dom.js";
import { number, percent } from "./format.js";

const HEIGHT = 180;
const MARGIN = { left: 44, right: 14, top: 12, bottom: 22 };
const WINDOW_S = 120;
/** Two samples further apart than this were not measured one after the other: the line breaks. */
const GAP_S = 3;

/** Round steps that cut 0..max into three to six parts. */
export function ticks(max) {
  const rough = Math.max(max, 1e-9) / 4;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= rough);
  return Array.from({ length: Math.ceil(max / step) + 1 }, (_, i) => i * step);
}

class Chart {
  /** @param {HTMLElement} figure holds a .legend and a .plot */
  constructor(figure) {
    this.legend = figure.querySelector(".legend");
    this.plot = figure.querySelector(".plot");
    this.figure = figure;
    new ResizeObserver(() => this.render()).observe(this.plot);
  }

  get width() {
    return this.plot.clientWidth;
  }

  canvas(label, ...children) {
    const viewBox = `0 0 ${this.width} ${HEIGHT}`;
    return svg("svg", { viewBox, width: this.width, height: HEIGHT, role: "img", "aria-label": label }, ...children);
  }

  /** Horizontal lines with their values, and a function from value to height. */
  scale(max, show) {
    const marks = ticks(max);
    const top = marks.at(-1);
    const y = (value) => HEIGHT - MARGIN.bottom - (value / top) * (HEIGHT - MARGIN.top - MARGIN.bottom);
    const lines = marks.flatMap((value) => [
      svg("line", { class: "grid", x1: MARGIN.left, x2: this.width - MARGIN.right, y1: y(value), y2: y(value) }),
      svg("text", { class: "axis", x: MARGIN.left - 6, y: y(value) + 4, "text-anchor": "end" }, show(value)),
    ]);
    return { y, lines };
  }
}

/**
 * @typedef {{key: string, label: string, kind: string, digits?: number}} Series `kind` is a class in the style sheet
 */
export class LineChart extends Chart {
  /**
   * @param {HTMLElement} figure
   * @param {Series[]} series
   * @param {{floor?: number, reference?: string}} options `floor`: the axis reaches at least this far
   */
  constructor(figure, series, { floor = 1, reference = null } = {}) {
    super(figure);
    this._series = series;
    this._floor = floor;
    this._referenceLabel = reference;
    this._samples = [];
    this._reference = null;
    this._pointer = null;
    this.plot.addEventListener("pointermove", (event) => {
      this._pointer = event.clientX - this.plot.getBoundingClientRect().left;
      this.render();
    });
    this.plot.addEventListener("pointerleave", () => {
      this._pointer = null;
      this.render();
    });
  }

  /** @param {Array<Object<string, number|null>>} samples each with `time` in seconds, oldest first */
  draw(samples, reference = null) {
    this._samples = samples;
    this._reference = reference;
    this.figure.dataset.points = String(samples.length);
    this.render();
  }

  render() {
    if (!this.width) return;
    const now = this._samples.at(-1)?.time ?? 0;
    const x = (time) => MARGIN.left + (1 - (now - time) / WINDOW_S) * (this.width - MARGIN.left - MARGIN.right);
    const values = this._samples.flatMap((sample) => this._series.map(({ key }) => sample[key] ?? 0));
    const { y, lines } = this.scale(Math.max(this._floor, this._reference ?? 0, ...values), (value) => number(value));
    const shown = this._pointed(x) ?? this._samples.at(-1);
    const parts = [...lines, ...this._times(x, now)];
    if (this._reference !== null) parts.push(this._referenceLine(y(this._reference)));
    for (const { key, kind } of this._series) parts.push(...this._line(key, kind, x, y));
    if (shown && this._pointer !== null)
      parts.push(svg("line", { class: "pointer", x1: x(shown.time), x2: x(shown.time), y1: MARGIN.top, y2: y(0) }));
    this.plot.replaceChildren(this.canvas(this._summary(), ...parts));
    this._showLegend(shown, now);
  }

  /** The sample under the pointer. */
  _pointed(x) {
    if (this._pointer === null) return null;
    const distance = (sample) => Math.abs(x(sample.time) - this._pointer);
    return this._samples.reduce((best, s) => (best && distance(best) <= distance(s) ? best : s), null);
  }

  _times(x, now) {
    const anchors = { 120: "start", 60: "middle", 0: "end" };
    return Object.entries(anchors).map(([ago, anchor]) => {
      const place = { class: "axis", x: x(now - ago), y: HEIGHT - 5, "text-anchor": anchor };
      return svg("text", place, ago === "0" ? "now" : `${ago} s ago`);
    });
  }

  _referenceLine(y) {
    return svg("line", { class: "reference", x1: MARGIN.left, x2: this.width - MARGIN.right, y1: y, y2: y });
  }

  /** A line that breaks where nothing was measured, and a dot at its end. */
  _line(key, kind, x, y) {
    let path = "";
    let previous = null;
    let last = null;
    for (const sample of this._samples) {
      const value = sample[key];
      const known = value !== null && value !== undefined;
      const joined = previous !== null && sample.time - previous < GAP_S;
      if (known) {
        path += `${joined ? "L" : "M"}${x(sample.time).toFixed(1)} ${y(value).toFixed(1)}`;
        last = sample;
      }
      previous = known ? sample.time : null;
    }
    const parts = [svg("path", { class: `line ${kind}`, d: path })];
    if (last && last === this._samples.at(-1))
      parts.push(svg("circle", { class: `dot ${kind}`, cx: x(last.time), cy: y(last[key]), r: 3.5 }));
    return parts;
  }

  _showLegend(sample, now) {
    const item = (kind, label, value) => el("li", {}, swatch(kind), `${label} `, el("strong", {}, value));
    const items = this._series.map(({ key, label, kind, digits = null }) =>
      item(kind, label, number(sample?.[key], digits)),
    );
    if (this._reference !== null) items.push(item("reference", this._referenceLabel, number(this._reference)));
    if (this._pointer !== null && sample) items.push(el("li", {}, `${Math.round(now - sample.time)} s ago`));
    this.legend.replaceChildren(...items);
  }

  _summary() {
    const last = this._samples.at(-1);
    return this._series.map(({ key, label, digits = null }) => `${label}: ${number(last?.[key], digits)}`).join(", ");
  }
}

/** Shares per draft position: a recent bar beside the bar of all time. */
export class PositionChart extends Chart {
  /**
   * @param {{position: number, tried: number, accepted: number}[]} recent
   * @param {{position: number, tried: number, accepted: number}[]} total
   */
  draw(recent, total) {
    const none = { tried: 0, accepted: 0 };
    this._groups = total.map((all) => [recent.find((one) => one.position === all.position) ?? none, all]);
    this.figure.dataset.points = String(total.reduce((sum, { tried }) => sum + tried, 0));
    this.render();
  }

  render() {
    if (!this.width || !this._groups) return;
    const { y, lines } = this.scale(1, (share) => percent(share, 1));
    const slot = (this.width - MARGIN.left - MARGIN.right) / Math.max(3, this._groups.length);
    const label = (position) => (slot < 50 ? position : `draft ${position}`);
    const bars = this._groups.flatMap(([recent, total], i) => {
      const middle = MARGIN.left + (i + 0.5) * slot;
      const width = Math.min(34, slot * 0.36);
      return [
        ...bar(recent, "recent", middle - width - 1, width, y),
        ...bar(total, "total", middle + 1, width, y),
        svg("text", { class: "axis", x: middle, y: HEIGHT - 5, "text-anchor": "middle" }, label(total.position)),
      ];
    });
    const middle = { class: "axis", x: this.width / 2, y: HEIGHT / 2, "text-anchor": "middle" };
    if (!this._groups.length) bars.push(svg("text", middle, "no drafts yet"));
    this.plot.replaceChildren(this.canvas(this._summary(), ...lines, ...bars));
  }

  _summary() {
    const parts = this._groups.map(([, all]) => `draft ${all.position}: ${percent(all.accepted, all.tried)}`);
    return `Accepted since load. ${parts.join(", ") || "No drafts yet"}`;
  }
}

function bar({ tried, accepted, position }, kind, x, width, y) {
  if (!tried) return [];
  const top = y(accepted / tried);
  const shape = svg("rect", { class: `bar ${kind}`, x, width, y: top, height: Math.max(0, y(0) - top), rx: 2 });
  shape.append(svg("title", {}, `draft ${position}: ${number(accepted)} of ${number(tried)} accepted`));
  const place = { class: "value", x: x + width / 2, y: top - 4, "text-anchor": "middle" };
  const label = svg("text", place, percent(accepted, tried));
  return width < 24 ? [shape] : [shape, label];
}

function swatch(kind) {
  return el("span", { class: `swatch ${kind}`, "aria-hidden": "true" });
}
