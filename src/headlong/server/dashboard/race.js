/**
 * The race: one prompt with drafting and without, one after the other so that neither slows the other, then shown
 * side by side from the recorded times.
 */

import { Answer } from "./answer.js";
import { ApiError, ConnectionLost, streamChat } from "./api.js";
import { askForKey } from "./connection.js";
import { byId } from "./dom.js";
import { number, plural, seconds } from "./format.js";
import { SettingError, chosenDepth, samplingFields, systemMessages } from "./settings.js";
import { Lane } from "./lane.js";

export class Race {
  /** @param {() => {model: string|null, running: number}} server what is known of the server now */
  constructor(server) {
    this._server = server;
    this._plain = new Lane(byId("lane-plain"));
    this._mtp = new Lane(byId("lane-mtp"));
    this._control = null;
    this._frame = null;
    byId("race-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this._start(byId("race-prompt").value);
    });
    byId("race-stop").addEventListener("click", () => this._control?.abort());
    byId("race-again").addEventListener("click", () => this._replay());
  }

  async _start(prompt) {
    if (this._control || !prompt.trim()) return;
    cancelAnimationFrame(this._frame);
    byId("race-result").hidden = true;
    byId("race-clock").textContent = "";
    byId("race-again").disabled = true;
    const depth = chosenDepth();
    this._control = new AbortController();
    this._busy(true);
    try {
      const shared = this._request(prompt);
      const shareMachine = this._server().running > 0;
      this._say("1 of 2: measuring plain decoding …");
      this._mtp.reset("waiting for its turn");
      await this._run(this._plain, { ...shared, speculative: { mtp: "off", trace: true } });
      this._say("2 of 2: measuring with MTP …");
      await this._run(this._mtp, { ...shared, speculative: { mtp: depth === "off" ? "auto" : depth, trace: true } });
      this._showResult(shared, shareMachine);
      this._replay();
    } catch (error) {
      this._failed(error);
    } finally {
      this._control = null;
      this._busy(false);
    }
  }

  async _run(lane, body) {
    const answer = new Answer();
    lane.begin(answer);
    const sent = performance.now();
    for await (const chunk of streamChat(body, this._control.signal)) {
      const at = performance.now() - sent;
      answer.add(chunk, at);
      lane.show(at);
    }
    lane.complete();
  }

  _request(prompt) {
    return {
      model: this._server().model ?? undefined,
      messages: [...systemMessages(), { role: "user", content: prompt }],
      ...samplingFields(),
    };
  }

  _failed(error) {
    if (error.status === 401) askForKey();
    this._say(error.name === "AbortError" ? "Stopped." : error.message);
    const expected = [ApiError, ConnectionLost, SettingError].some((kind) => error instanceof kind);
    if (!expected && error.name !== "AbortError") throw error;
  }

  _showResult({ temperature, seed }, shareMachine) {
    const plain = this._plain.answer, mtp = this._mtp.answer;
    const ratio = mtp.figures().perSecond / plain.figures().perSecond;
    const texts = [plain, mtp].map((answer) => answer.tokens.map((token) => token.text));
    const longest = Math.max(...texts.map((list) => list.length));
    const differs = Array.from({ length: longest }).findIndex((_, i) => texts[0][i] !== texts[1][i]);
    const same = differs < 0;
    byId("race-ratio").textContent = Number.isFinite(ratio) ? `${number(ratio, 2)}×` : "–";
    byId("race-speeds").textContent =
      `${number(mtp.figures().perSecond)} against ${number(plain.figures().perSecond)} tokens/s while decoding, ` +
      `by the server's clock; ${plural(mtp.figures().steps, "step")} against ${number(plain.figures().steps)}.`;
    const verdict = byId("race-same");
    verdict.dataset.same = String(same);
    verdict.textContent = same
      ? `Same tokens: yes, all ${number(texts[0].length)}.`
      : `Same tokens: no, they part at token ${number(differs + 1)}.`;
    byId("race-note").textContent =
      "One run each; other work on the machine moves the ratio. " +
      `Temperature ${temperature ?? "as the server has it"}, seed ${seed}, as set beside the playground.` +
      (shareMachine ? " Other requests were running, so the speeds are not comparable." : "") +
      (mtp.figures().noDrafts ? ` MTP did not run: ${mtp.figures().noDrafts}.` : "");
    byId("race-result").hidden = false;
    byId("race-again").disabled = false;
  }

  /** Both lanes from the same start, at the speed they had, or slower. */
  _replay() {
    cancelAnimationFrame(this._frame);
    const speed = Number(byId("race-speed").value);
    const end = Math.max(this._plain.duration, this._mtp.duration);
    this._plain.rewind();
    this._mtp.rewind();
    this._say("");
    let began = null;
    const frame = (now) => {
      began ??= now;
      const at = (now - began) * speed;
      this._plain.show(at);
      this._mtp.show(at);
      const pace = speed === 1 ? "at true speed" : `at ${speed} of true speed`;
      byId("race-clock").textContent = `Side by side, ${pace}: ${seconds(Math.min(at, end))}`;
      if (at < end) this._frame = requestAnimationFrame(frame);
    };
    this._frame = requestAnimationFrame(frame);
  }

  _busy(busy) {
    byId("race-start").hidden = busy;
    byId("race-stop").hidden = !busy;
  }

  _say(message) {
    byId("race-status").textContent = message;
  }
}
