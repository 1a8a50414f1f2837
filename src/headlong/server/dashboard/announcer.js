/** Reads a stream aloud to screen readers a sentence at a time: token by token nobody could follow. */

const SENTENCE_END = /[.!?:;]["”)]?\s|\n/;

export class Announcer {
  /** @param {HTMLElement} region a visually hidden live region */
  constructor(region) {
    this._region = region;
    this._pending = "";
  }

  say(text) {
    this._pending += text;
    for (let match; (match = SENTENCE_END.exec(this._pending)); ) {
      const end = match.index + match[0].length;
      this._speak(this._pending.slice(0, end));
      this._pending = this._pending.slice(end);
    }
  }

  finish() {
    this._speak(this._pending);
    this._pending = "";
  }

  _speak(sentence) {
    if (!sentence.trim()) return;
    const line = document.createElement("p");
    line.textContent = sentence.trim();
    this._region.append(line);
    while (this._region.childElementCount > 20) this._region.firstElementChild.remove();
  }
}
