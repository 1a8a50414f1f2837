/** The conversation on the page: sends messages, shows answers as they stream, stops, repeats, edits and clears. */

import { Announcer } from "./announcer.js";
import { Answer } from "./answer.js";
import { AnswerView } from "./answer_view.js";
import { ApiError, ConnectionLost, streamChat } from "./api.js";
import { askForKey } from "./connection.js";
import { Conversation, LEFT } from "./conversation.js";
import { byId, el } from "./dom.js";
import { QuestionView } from "./question_view.js";
import { chosenDepth, samplingFields, systemMessages } from "./settings.js";
import { toolFields, wireTools } from "./tool_calls.js";

const EXAMPLES = [
  "Write a short story about a shy dragon who learns to share.",
  "Explain to a child why the sky is blue.",
  "Write a letter to a friend who moved to another city.",
];
/** Settings that belong to what is said, and are kept with it. */
const KEPT = ["system", "tools"];

export class Playground {
  /**
   * @param {() => string|null} model the name requests carry
   * @param {(view: AnswerView) => void} onStepThrough
   */
  constructor(model, onStepThrough) {
    this._model = model;
    this._onStepThrough = onStepThrough;
    this._log = byId("log");
    this._message = byId("message");
    this._announcer = new Announcer(byId("announcer"));
    this._running = null;
    this._conversation = new Conversation();
    /** @type {WeakMap<import("./conversation.js").Turn, Element[]>} */
    this._elements = new WeakMap();
    const submit = (event) => {
      event.preventDefault();
      this.send(this._message.value);
    };
    byId("composer").addEventListener("submit", submit);
    this._message.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event);
    });
    byId("stop").addEventListener("click", () => this.stop());
    byId("clear").addEventListener("click", () => this.clear());
    byId("show-refused").addEventListener("change", (event) =>
      this._log.classList.toggle("show-refused", event.target.checked),
    );
    const example = (text) => el("button", { type: "button", class: "example", onClick: () => this.send(text) }, text);
    byId("examples").append(...EXAMPLES.map(example));
    wireTools();
    this._restore();
    for (const id of KEPT) byId(id).addEventListener("change", () => this._keep());
    window.addEventListener("pagehide", () => {
      if (this._running) this._keep();
      this.stop(LEFT); // a page that is shown again shows what was kept
    });
  }

  stop(notice = "Stopped.") {
    this._running?.abort(new DOMException(notice, "AbortError"));
  }

  clear() {
    this.stop();
    this._conversation = new Conversation(); // an answer that still ends belongs to the old one
    this._keep();
    this._log.querySelectorAll(".turn").forEach((turn) => turn.remove());
    byId("welcome").hidden = false;
    this._complain("");
    this._message.focus();
  }

  /** Sends one message with the conversation before it. */
  async send(text) {
    if (!text.trim()) return;
    const turn = await this._ask([{ role: "user", content: text }], this._conversation.turns.length, () => {
      this._message.value = "";
    });
    if (turn?.state === "failed" && !turn.answer.text) this._message.value ||= text;
  }

  /**
   * Asks in the place of turn number `place`, which replaces it and all after it.
   * @returns {Promise<import("./conversation.js").Turn|null>} the turn when it has ended; null if nothing was sent
   */
  async _ask(input, place, onSent = () => {}) {
    if (this._running) return null;
    let body;
    try {
      body = this._request(input, place);
    } catch (error) {
      this._complain(error.message);
      return null;
    }
    this._complain("");
    onSent();
    const { turns } = this._conversation;
    for (const old of turns.splice(place)) this._elements.get(old).forEach((element) => element.remove());
    const request = { model: body.model ?? null, seed: body.seed, mtp: body.speculative.mtp };
    const turn = { input, request, answer: new Answer(), state: "running", notice: "" };
    turns.push(turn);
    const view = this._show(turn);
    this._scroller().scrollTop = this._scroller().scrollHeight;
    this._keep();
    await this._run(body, view);
    if (this._conversation.turns === turns) this._keep();
    return turn;
  }

  /** Adds a turn's elements to the log. */
  _show(turn) {
    byId("welcome").hidden = true;
    const place = () => this._conversation.turns.indexOf(turn);
    const question = new QuestionView(turn.input, (text) => this._ask([{ role: "user", content: text }], place()));
    const view = new AnswerView(turn, {
      stepThrough: () => this._onStepThrough(view),
      retry: () => this._ask(turn.input, place()),
      results: (messages) => this._ask(messages, place() + 1),
    });
    this._log.append(question.element, view.element);
    this._elements.set(turn, [question.element, view.element]);
    return view;
  }

  async _run(body, view) {
    const control = (this._running = new AbortController());
    this._busy(true);
    const sent = performance.now();
    const following = (change) => this._following(change);
    try {
      for await (const chunk of streamChat(body, control.signal)) {
        const pieces = view.add(chunk, performance.now() - sent, following);
        this._announcer.say(pieces.filter(({ kind }) => kind === "content").map(({ text }) => text).join(""));
      }
      following(() => view.finish());
    } catch (error) {
      following(() => this._failed(error, view, control.signal));
    } finally {
      this._announcer.finish();
      if (this._running === control) this._running = null;
      this._busy(this._running !== null);
    }
  }

  _failed(error, view, signal) {
    if (signal.aborted) return view.finish(signal.reason.message);
    if (error instanceof ApiError || error instanceof ConnectionLost) view.fail(error.message);
    else {
      view.fail("The page could not read the answer.");
      throw error;
    }
    if (error.status === 401) askForKey();
  }

  _request(input, place) {
    return {
      model: this._model() ?? undefined,
      messages: [...systemMessages(), ...this._conversation.messages(place), ...input],
      ...toolFields(),
      ...samplingFields(),
      speculative: { mtp: chosenDepth(), trace: true },
    };
  }

  _keep() {
    const settings = Object.fromEntries(KEPT.map((id) => [id, byId(id).value]));
    if (this._conversation.turns.length || KEPT.some((id) => settings[id])) this._conversation.keep(settings);
    else Conversation.forget();
  }

  _restore() {
    const settings = this._conversation.restore();
    for (const id of KEPT) byId(id).value = settings?.[id] ?? "";
    try {
      for (const turn of this._conversation.turns) this._show(turn);
    } catch {
      return this.clear(); // another version's, or damaged
    }
    if (this._conversation.turns.length)
      requestAnimationFrame(() => (this._scroller().scrollTop = this._scroller().scrollHeight));
  }

  _busy(busy) {
    byId("send").hidden = busy;
    byId("stop").hidden = !busy;
    this._log.setAttribute("aria-busy", String(busy));
  }

  _complain(message) {
    byId("complaint").textContent = message;
  }

  /** What scrolls: the log beside the settings, or the whole page where there is no room beside it. */
  _scroller() {
    return getComputedStyle(this._log).overflowY === "auto" ? this._log : document.scrollingElement;
  }

  /** Makes a change to the log; a reader who was looking at its end still is afterwards. */
  _following(change) {
    const box = this._scroller();
    const atEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 60;
    change();
    if (atEnd) box.scrollTop = box.scrollHeight;
  }
}
