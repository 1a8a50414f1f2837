/** One lane of the race: fills with an answer's tokens up to a moment, live or from its recorded times. */

import { number, plural, seconds } from "./format.js";
import { TokenText } from "./tokens.js";

export class Lane {
  /** @param {HTMLElement} root a section with a bar, figures and a place for tokens */
  constructor(root) {
    this._root = root;
    this._tokens = root.querySelector(".tokens");
    this._bar = root.querySelector("progress");
    this._figures = root.querySelector(".readout");
    this.answer = null;
    this.reset("");
  }

  get duration() {
    return this.answer?.steps.at(-1)?.at ?? 0;
  }

  reset(message) {
    this.answer = null;
    this._total = null;
    this.rewind();
    this._figures.textContent = message;
  }

  begin(answer) {
    this.reset("");
    this.answer = answer;
  }

  /** Every step is known now, so the bar can say how far along a moment is. */
  complete() {
    this._total = this.answer.tokens.length;
    this.show(Infinity);
  }

  rewind() {
    this._tokens.replaceChildren();
    this._text = new TokenText(this._tokens);
    this._shown = 0;
    this._count = 0;
    this._bar.value = 0;
    this._root.classList.remove("done");
  }

  /** Shows the steps that had come `at` milliseconds after the request was sent. */
  show(at) {
    const { steps } = this.answer;
    while (this._shown < steps.length && steps[this._shown].at <= at) {
      const step = steps[this._shown++];
      this._count += step.tokens.length;
      this._text.append(step.tokens.map((token) => ({ text: token.text, token })));
    }
    this._tokens.scrollTop = this._tokens.scrollHeight;
    const ended = this._total !== null && this._shown === steps.length;
    this._root.classList.toggle("done", ended);
    this._bar.value = this._total ? this._count / this._total : 0;
    const time = ended ? this.duration : Math.min(at, this.duration);
    this._figures.textContent =
      `${plural(this._count, "token")} · ${plural(this._shown, "pass", "passes")} · ${seconds(time)}` +
      (ended ? ` · ${number(this.answer.figures().perSecond)} tokens/s` : "");
  }
}
