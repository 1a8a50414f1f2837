/**
 * Steps through a finished answer: the head guesses, the target checks, the text grows. Knows answers; sends
 * nothing.
 */

import { beyondEnd, ownToken } from "./answer.js";
import { byId, el } from "./dom.js";
import { number, plural, visible } from "./format.js";
import { stageOf } from "./stage.js";
import { StepStrip } from "./strip.js";
import { TokenText, stepName } from "./tokens.js";

const GUESS = 0;
const CHECK = 1;
const KEEP = 2;
const PAUSE_MS = { [GUESS]: 1300, [CHECK]: 1300, [KEEP]: 1000 };

export class Replay {
  constructor() {
    /** @type {import("./answer.js").Step[]} */
    this._steps = [];
    this._at = 0;
    this._phase = KEEP;
    this._timer = null;
    this._strip = new StepStrip(byId("strip"), byId("replay-slider"), (index) => this._jump(index));
    const press = (id, action) =>
      byId(id).addEventListener("click", () => {
        this._pause();
        action();
      });
    press("replay-first", () => this._show(0, this._firstPhase(0)));
    press("replay-back", () => this._back());
    press("replay-next", () => this._forward());
    press("replay-last", () => this._show(this._steps.length - 1, KEEP));
    byId("replay-play").addEventListener("click", () => (this._timer === null ? this._play() : this._pause()));
    byId("replay-stage").addEventListener("keydown", (event) => this._onKey(event));
  }

  /** Opens an answer at the first step in which the head guessed. */
  load(answer, question) {
    this._pause();
    this._steps = answer.steps;
    const { tokens, steps, perStep } = answer.figures();
    byId("replay-empty").hidden = true;
    byId("replay-body").hidden = false;
    byId("replay-question").textContent = question;
    const passes = steps + (this._steps[0]?.number === 0 ? 1 : 0);
    byId("replay-summary").textContent =
      `${plural(tokens, "token")} from ${plural(passes, "pass", "passes")} of the target` +
      (perStep ? `, ${number(perStep, 2)} tokens a step` : "") +
      `. Plain decoding makes one pass for every token: ${number(tokens)}.`;
    this._strip.load(this._steps);
    const start = Math.max(0, this._steps.findIndex((step) => step.drafted > 0));
    this._show(start, this._firstPhase(start));
  }

  _firstPhase(index) {
    return this._steps[index]?.drafted ? GUESS : KEEP;
  }

  _jump(index) {
    this._pause();
    this._show(index, this._firstPhase(index));
  }

  /** @returns {boolean} whether there was anything left to show */
  _forward() {
    if (this._phase < KEEP) this._show(this._at, this._phase + 1);
    else if (this._at + 1 < this._steps.length) this._show(this._at + 1, this._firstPhase(this._at + 1));
    else return false;
    return true;
  }

  _back() {
    if (this._phase > this._firstPhase(this._at)) this._show(this._at, this._phase - 1);
    else if (this._at > 0) this._show(this._at - 1, KEEP);
  }

  _play() {
    if (this._at === this._steps.length - 1 && this._phase === KEEP) this._show(0, this._firstPhase(0));
    this._setPlaying(true);
    const tick = () => {
      if (!this._forward()) return this._pause();
      this._timer = setTimeout(tick, this._wait());
    };
    this._timer = setTimeout(tick, this._wait());
  }

  _wait() {
    return PAUSE_MS[this._phase] / Number(byId("replay-speed").value);
  }

  _pause() {
    clearTimeout(this._timer);
    this._timer = null;
    this._setPlaying(false);
  }

  _setPlaying(playing) {
    byId("replay-play").textContent = playing ? "Pause" : "Play";
    // While it plays by itself the narration would talk over itself.
    byId("replay-story").setAttribute("aria-live", playing ? "off" : "polite");
  }

  _onKey(event) {
    const action = { ArrowRight: () => this._forward(), ArrowLeft: () => this._back() }[event.key];
    if (!action) return;
    event.preventDefault();
    this._pause();
    action();
  }

  _show(index, phase) {
    this._at = index;
    this._phase = phase;
    const step = this._steps[index];
    byId("replay-step").textContent = `${stepName(step)} of ${this._steps.at(-1).number}`;
    byId("replay-slider").setAttribute("aria-valuetext", stepName(step));
    byId("replay-story").textContent = story(step, phase);
    this._strip.mark(index);
    this._showTally(index, phase === KEEP);
    this._showText(index, phase === KEEP);
    byId("replay-stage").replaceChildren(stageOf(step, phase));
    byId("replay-back").disabled = index === 0 && phase === this._firstPhase(0);
    byId("replay-next").disabled = index === this._steps.length - 1 && phase === KEEP;
  }

  /** What the passes so far have given, against the one token a pass of plain decoding. */
  _showTally(index, decided) {
    const passes = index + Number(decided);
    const count = (steps) => steps.reduce((sum, step) => sum + step.tokens.length, 0);
    byId("tally-passes").textContent = `Tokens after ${plural(passes, "pass", "passes")}`;
    for (const [name, tokens] of [["mtp", count(this._steps.slice(0, passes))], ["plain", passes]]) {
      byId(`tally-${name}`).max = count(this._steps);
      byId(`tally-${name}`).value = tokens;
      byId(`tally-${name}-text`).textContent = number(tokens);
    }
  }

  /** The text before the step, and what the step added once it is decided. */
  _showText(index, decided) {
    const text = byId("replay-text");
    text.replaceChildren();
    const pieces = (steps) => steps.flatMap((step) => step.tokens.map((token) => ({ text: token.text, token })));
    const before = el("span", { class: "settled" });
    new TokenText(before).append(pieces(this._steps.slice(0, index)));
    text.append(before);
    if (decided) {
      const added = el("span", { class: "added" });
      new TokenText(added).append(pieces([this._steps[index]]));
      text.append(added);
    }
    text.append(el("span", { class: "caret", "aria-hidden": "true" }));
    text.scrollTop = text.scrollHeight;
  }
}

/** What happens in one phase of a step, in words. */
export function story(step, phase) {
  const own = ownToken(step);
  if (!step.number) return "The target reads the whole prompt in one pass and gives the first token.";
  if (!step.drafted) return "Nothing is drafted in this step: the target gives one token, as in plain decoding.";
  const drafts = step.drafted === 1 ? "token" : plural(step.drafted, "token");
  if (phase === GUESS) return `The head, a small part of the model, guesses the next ${drafts}. That is cheap.`;
  const all = step.drafted === 1 ? "it" : `all ${step.drafted}`;
  const missed = step.refused.length ? visible(step.refused[0]) : null;
  if (phase === CHECK) {
    if (missed === null) return `The target checks ${all} in a single pass, and agrees with ${all}.`;
    if (!step.accepted) return `The target checks ${all} in a single pass. It would not have written “${missed}”.`;
    return `The target checks ${all} in a single pass. It agrees with ${step.accepted} and refuses “${missed}”.`;
  }
  const gained = `${plural(step.tokens.length, "token")} from one pass`;
  const after = beyondEnd(step);
  const dropped = after ? ` ${plural(after, "guess lies", "guesses lie")} after the end and count for nothing.` : "";
  if (after || !own) return `The answer ends here: ${gained}.${dropped}`;
  if (missed === null) return `The same pass also says what comes next, “${visible(own.text)}”: ${gained}.`;
  return `In its place the target writes “${visible(own.text)}”: ${gained}, and the text plain decoding gives.`;
}
