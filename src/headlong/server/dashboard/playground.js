/** The conversation: sends messages, shows answers as they stream, stops and clears them. */

import { ApiError, ConnectionLost, streamChat } from "./api.js";
import { askForKey } from "./connection.js";
import { AnswerView } from "./answer_view.js";
import { Announcer } from "./announcer.js";
import { byId, el } from "./dom.js";
import { chosenDepth, samplingFields, systemMessages } from "./settings.js";

const EXAMPLES = [
  "Write a short story about a shy dragon who learns to share.",
  "Explain to a child why the sky is blue.",
  "Write a letter to a friend who moved to another city.",
];

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
    this._turns = [];
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send(this._message.value);
    });
    this._message.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.send(this._message.value);
    });
    byId("stop").addEventListener("click", () => this.stop());
    byId("clear").addEventListener("click", () => this.clear());
    byId("show-refused").addEventListener("change", (event) =>
      this._log.classList.toggle("show-refused", event.target.checked),
    );
    const example = (text) => el("button", { type: "button", class: "example", onClick: () => this.send(text) }, text);
    byId("examples").append(...EXAMPLES.map(example));
  }

  stop() {
    this._running?.abort();
  }

  clear() {
    this.stop();
    this._turns = [];
    this._log.querySelectorAll(".turn").forEach((turn) => turn.remove());
    byId("welcome").hidden = false;
    this._message.focus();
  }

  /** Sends one message with the conversation before it. */
  async send(text) {
    if (!text.trim() || this._running) return;
    let body;
    try {
      body = this._request(text);
    } catch (error) {
      return this._complain(error.message);
    }
    this._complain("");
    this._message.value = "";
    byId("welcome").hidden = true;
    const view = new AnswerView(body, this._onStepThrough);
    const question = el("article", { class: "turn question" }, el("h3", {}, "You"), el("p", { class: "said" }, text));
    this._log.append(question, view.element);
    this._scroller().scrollTop = this._scroller().scrollHeight;
    const turns = this._turns; // clearing meanwhile starts another list
    await this._run(body, view);
    // A question without an answer is not part of what the model is shown next.
    const { text: answer } = view.answer;
    if (answer) turns.push({ role: "user", content: text }, { role: "assistant", content: answer });
    else if (view.failed) this._message.value ||= text;
  }

  async _run(body, view) {
    const control = (this._running = new AbortController());
    this._busy(true);
    const sent = performance.now();
    try {
      for await (const chunk of streamChat(body, control.signal)) {
        this._following(() => {
          const pieces = view.add(chunk, performance.now() - sent).filter((piece) => piece.kind === "content");
          this._announcer.say(pieces.map((piece) => piece.text).join(""));
        });
      }
      this._following(() => view.finish());
    } catch (error) {
      this._following(() => this._failed(error, view, control.signal.aborted));
    } finally {
      this._announcer.finish();
      if (this._running === control) this._running = null;
      this._busy(this._running !== null);
    }
  }

  _failed(error, view, stopped) {
    if (stopped) return view.finish("Stopped.");
    if (error instanceof ApiError || error instanceof ConnectionLost) view.fail(error.message);
    else {
      view.fail("The page could not read the answer.");
      throw error;
    }
    if (error.status === 401) askForKey();
  }

  _request(text) {
    return {
      model: this._model() ?? undefined,
      messages: [...systemMessages(), ...this._turns, { role: "user", content: text }],
      ...samplingFields(),
      speculative: { mtp: chosenDepth(), trace: true },
    };
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
