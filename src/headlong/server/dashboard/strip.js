/** All steps of an answer at a glance: one column a step, as high as the tokens it gave. */

import { svg } from "./dom.js";

const HEIGHT = 64;
const MAX_COLUMN = 26;

export class StepStrip {
  /**
   * @param {HTMLElement} root
   * @param {HTMLInputElement} slider moves along the columns, for the keyboard
   * @param {(index: number) => void} onPick
   */
  constructor(root, slider, onPick) {
    this._root = root;
    this._slider = slider;
    this._steps = [];
    this._at = 0;
    root.addEventListener("click", (event) => {
      const index = Math.floor((event.clientX - root.getBoundingClientRect().left) / this._column());
      if (index >= 0 && index < this._steps.length) onPick(index);
    });
    slider.addEventListener("input", () => onPick(Number(slider.value)));
    new ResizeObserver(() => this._draw()).observe(root);
  }

  load(steps) {
    this._steps = steps;
    this._slider.max = String(steps.length - 1);
    this._draw();
  }

  mark(index) {
    this._at = index;
    this._slider.value = String(index);
    this._marker?.setAttribute("x", String(index * this._column()));
  }

  _column() {
    return Math.min(MAX_COLUMN, this._root.clientWidth / Math.max(1, this._steps.length));
  }

  /** Three paths for all steps, so that long answers stay light. */
  _draw() {
    const width = this._root.clientWidth;
    if (!width || !this._steps.length) return;
    const column = this._column();
    const deepest = Math.max(...this._steps.map((step) => step.tokens.length + step.refused.length));
    const unit = Math.min(12, (HEIGHT - 4) / deepest);
    const gap = column > 4 ? 1.5 : 0.25;
    const paths = { drafted: "", own: "", refused: "" };
    this._steps.forEach((step, i) => {
      const kept = step.tokens.map((token) => (token.drafted ? "drafted" : "own"));
      [...kept, ...step.refused.map(() => "refused")].forEach((kind, level) => {
        const inset = kind === "refused" ? 0.5 : 0; // half the outline's width, which a filled cell has not
        const wide = column - 2 * (gap + inset);
        const high = unit - 1.5 - 2 * inset;
        const top = HEIGHT - 1 - (level + 1) * unit + inset;
        paths[kind] += `M${i * column + gap + inset} ${top}h${wide}v${high}h${-wide}z`;
      });
    });
    this._marker = svg("rect", { class: "marker", y: 0, width: column, height: HEIGHT, rx: 2 });
    const shapes = Object.entries(paths).map(([kind, d]) => svg("path", { class: kind, d }));
    this._root.replaceChildren(svg("svg", { width, height: HEIGHT, "aria-hidden": "true" }, this._marker, ...shapes));
    this._slider.style.width = `${column * this._steps.length}px`;
    this.mark(this._at);
  }
}
