/** One answer in the conversation: reasoning, tokens, tool calls, how it ended and how fast it was. */

import { Answer } from "./answer.js";
import { el } from "./dom.js";
import { number, percent, plural } from "./format.js";
import { TokenText } from "./tokens.js";

export class AnswerView {
  /**
   * @param {object} body the request, for the figures' line
   * @param {(view: AnswerView) => void} onStepThrough
   */
  constructor(body, onStepThrough) {
    this.answer = new Answer();
    this.failed = false;
    this._body = body;
    this.question = body.messages.at(-1).content;
    this._tokens = tokenGroup("Answer");
    this._content = new TokenText(this._tokens);
    this._reasoning = null;
    this._tools = el("div", { class: "tools" });
    this._notice = el("p", { class: "notice", role: "status", hidden: true });
    this._readout = el("p", { class: "readout" });
    this._stepThrough = el(
      "button",
      { type: "button", class: "step-through small", hidden: true, onClick: () => onStepThrough(this) },
      "Step through",
    );
    this.element = el(
      "article",
      { class: "turn answer streaming" },
      el("h3", {}, body.model ?? "Model"),
      this._tokens,
      this._tools,
      this._notice,
      el("footer", {}, this._readout, this._stepThrough),
    );
    this._redraw = null;
  }

  /** Takes one chunk; returns the pieces of text it brought. */
  add(chunk, at) {
    const pieces = this.answer.add(chunk, at);
    const reasoning = pieces.filter((piece) => piece.kind === "reasoning");
    if (reasoning.length) (this._reasoning ??= this._openReasoning()).append(reasoning);
    this._content.append(pieces.filter((piece) => piece.kind === "content"));
    this._redraw ??= requestAnimationFrame(() => this._draw());
    return pieces;
  }

  /** The answer is complete, or was stopped by the reader. */
  finish(notice = "") {
    const reason = this.answer.finishReason;
    this._end(notice || (reason === "length" ? "Ended at the limit of max tokens." : ""));
    if (notice) this.element.classList.add("stopped");
  }

  /** The answer will never be complete. */
  fail(message) {
    this.failed = true;
    this.element.classList.add("failed");
    const begun = this.answer.steps.length || this.answer.pieces.length;
    this._end(begun ? `Incomplete: ${message}` : message);
  }

  _end(notice) {
    cancelAnimationFrame(this._redraw);
    this._draw();
    this.element.classList.remove("streaming");
    this._notice.textContent = notice;
    this._notice.hidden = !notice;
    this._stepThrough.hidden = !this.answer.steps.length;
    this._tokens.tabIndex = this.answer.steps.length ? 0 : -1;
  }

  _draw() {
    this._redraw = null;
    this._readout.textContent = this._figures();
    this._tools.replaceChildren(
      ...this.answer.toolCalls.filter(Boolean).map((call) =>
        el("figure", { class: "tool" }, el("figcaption", {}, `Tool call: ${call.name}`), el("pre", {}, call.arguments)),
      ),
    );
  }

  _figures() {
    const figures = this.answer.figures();
    if (!figures.tokens) return "";
    const parts = [plural(figures.tokens, "token"), `${number(figures.perSecond)} tokens/s`];
    if (figures.perStep !== null) parts.push(`${number(figures.perStep, 2)} tokens per step`);
    if (figures.drafted) parts.push(`${percent(figures.accepted, figures.drafted)} of drafts accepted`);
    const { mtp } = this._body.speculative;
    if (figures.drafted) parts.push(mtp === "auto" ? `K auto (mean ${number(figures.k, 1)})` : `K ${mtp}`);
    else if (figures.steps) parts.push("K 0");
    parts.push(`seed ${this._body.seed}`);
    if (figures.noDrafts && mtp !== "off") parts.push(`no drafts: ${figures.noDrafts}`);
    return parts.join(" · ");
  }

  _openReasoning() {
    const tokens = tokenGroup("Reasoning");
    tokens.tabIndex = 0;
    this._tokens.before(el("details", { class: "reasoning" }, el("summary", {}, "Reasoning"), tokens));
    return new TokenText(tokens);
  }
}

/** Where tokens go: one stop for the Tab key, arrow keys inside. */
function tokenGroup(label) {
  return el("div", { class: "tokens", role: "group", "aria-label": `${label}; arrow keys move from token to token` });
}
