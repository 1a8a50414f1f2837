/** One answer in the conversation: reasoning, text, tool calls, how it ended and how fast it was. */

import { AnswerText } from "./answer_text.js";
import { copyButton } from "./clipboard.js";
import { el } from "./dom.js";
import { number, percent, plural } from "./format.js";
import { TokenText } from "./tokens.js";
import { ToolCallsView } from "./tool_calls.js";

const FRAME_MS = 16;
/** Of the time between two drawings at most this share goes into drawing, however long the text. */
const MAX_SHARE = 0.25;

export class AnswerView {
  /**
   * @param {import("./conversation.js").Turn} turn
   * @param {{stepThrough: () => void, retry: () => void, results: (messages: object[]) => void}} actions
   */
  constructor(turn, actions) {
    this.turn = turn;
    this.question = turn.input.at(-1).content;
    this._tokens = tokenGroup("Answer");
    this._content = new AnswerText(this._tokens);
    this._reasoning = null;
    this._tools = new ToolCallsView(actions.results);
    this._notice = el("p", { class: "notice", role: "status", hidden: true });
    this._readout = el("p", { class: "readout" });
    const button = (name, label, action) =>
      el("button", { type: "button", class: `${name} small`, onClick: action }, label);
    this._stepThrough = button("step-through", "Step through", actions.stepThrough);
    this._copy = copyButton(() => this.answer.text, "Copy the answer");
    this._acts = el(
      "div",
      { class: "acts", hidden: true },
      this._copy,
      button("retry", "Retry", actions.retry),
      this._stepThrough,
    );
    this.element = el(
      "article",
      { class: "turn answer streaming" },
      el("h3", {}, turn.request.model ?? "Model"),
      this._tokens,
      this._tools.element,
      this._notice,
      el("footer", {}, this._readout, this._acts),
    );
    this._timer = null;
    this._pause = FRAME_MS;
    if (turn.state !== "running") this._restore();
  }

  get answer() {
    return this.turn.answer;
  }

  /** Takes one chunk; returns the pieces of text it brought. `drawing` wraps what changes the page's height. */
  add(chunk, at, drawing) {
    const pieces = this.answer.add(chunk, at);
    this._take(pieces);
    this._timer ??= setTimeout(() => drawing(() => this._draw()), this._pause);
    return pieces;
  }

  /** The answer is complete, or was stopped by the reader. */
  finish(notice = "") {
    const limited = this.answer.finishReason === "length" ? "Ended at the limit of max tokens." : "";
    Object.assign(this.turn, { state: notice ? "stopped" : "done", notice: notice || limited });
    this._end();
  }

  /** The answer will never be complete. */
  fail(message) {
    const begun = this.answer.steps.length || this.answer.pieces.length;
    Object.assign(this.turn, { state: "failed", notice: begun ? `Incomplete: ${message}` : message });
    this._end();
  }

  _restore() {
    this._take(this.answer.pieces);
    this._end();
  }

  _take(pieces) {
    const reasoning = pieces.filter((piece) => piece.kind === "reasoning");
    if (reasoning.length) (this._reasoning ??= this._openReasoning()).append(reasoning);
    this._content.add(pieces.filter((piece) => piece.kind === "content"));
  }

  _end() {
    const { state, notice } = this.turn;
    clearTimeout(this._timer);
    this._draw();
    if (state === "done") this._tools.ask(this.answer);
    this.element.classList.remove("streaming");
    if (state !== "done") this.element.classList.add(state);
    this._notice.textContent = notice;
    this._notice.hidden = !notice;
    this._acts.hidden = false;
    this._copy.hidden = !this.answer.text;
    this._stepThrough.hidden = !this.answer.steps.length;
    this._tokens.tabIndex = this.answer.steps.length ? 0 : -1;
  }

  _draw() {
    const began = performance.now();
    this._timer = null;
    this._content.draw();
    this._readout.textContent = this._figures();
    this._tools.draw(this.answer);
    this._pause = Math.max(FRAME_MS, (performance.now() - began) / MAX_SHARE);
  }

  _figures() {
    const figures = this.answer.figures();
    if (!figures.tokens) return "";
    const parts = [plural(figures.tokens, "token"), `${number(figures.perSecond)} tokens/s`];
    if (figures.perStep !== null) parts.push(`${number(figures.perStep, 2)} tokens per step`);
    if (figures.drafted) parts.push(`${percent(figures.accepted, figures.drafted)} of drafts accepted`);
    const { mtp, seed } = this.turn.request;
    if (figures.drafted) parts.push(mtp === "auto" ? `K auto (mean ${number(figures.k, 1)})` : `K ${mtp}`);
    else if (figures.steps) parts.push("K 0");
    parts.push(`seed ${seed}`);
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
