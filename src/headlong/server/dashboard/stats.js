/**
 * Follows `/v1/stats/stream` and comes back by itself when it breaks. Knows no page.
 *
 * Events: `snapshot` (detail: the snapshot) and `state` (detail: {name, message, retryAt}) with the names
 * `connecting`, `live`, `lost` and `locked` (the server wants an API key).
 */

import { ApiError, streamStats } from "./api.js";

const BACKOFF_S = [1, 2, 4, 8, 15];
const SILENCE_MS = 6000;

export class StatsFeed extends EventTarget {
  constructor() {
    super();
    this.state = { name: "connecting", message: "", retryAt: null };
    this._failures = 0;
    this._wake = () => {};
  }

  /** Runs for as long as the page is open. */
  async run() {
    for (;;) {
      const message = await this._follow();
      const wait = BACKOFF_S[Math.min(this._failures++, BACKOFF_S.length - 1)] * 1000;
      if (message === null) this._enter("locked", "This server asks for an API key.");
      else this._enter("lost", message, Date.now() + wait);
      await this._sleep(message === null ? null : wait);
    }
  }

  /** Tries again at once: the reader asked, or gave a key. */
  retryNow() {
    this._wake();
  }

  /** Follows one connection to its end; returns why it ended, or null if a key is missing. */
  async _follow() {
    const control = new AbortController();
    let draining = false;
    let watchdog = setTimeout(() => control.abort(), SILENCE_MS);
    try {
      for await (const snapshot of streamStats(control.signal)) {
        clearTimeout(watchdog);
        watchdog = setTimeout(() => control.abort(), SILENCE_MS);
        draining = snapshot.draining;
        if (!draining) this._failures = 0;
        if (this.state.name !== "live") this._enter("live", "");
        this.dispatchEvent(new CustomEvent("snapshot", { detail: snapshot }));
      }
      return draining ? "The server is shutting down." : "The server ended the connection.";
    } catch (error) {
      if (error instanceof ApiError && error.status === 401) return null;
      if (error.name === "AbortError") return "The server has gone silent.";
      return error.message;
    } finally {
      clearTimeout(watchdog);
    }
  }

  _enter(name, message, retryAt = null) {
    this.state = { name, message, retryAt };
    this.dispatchEvent(new CustomEvent("state", { detail: this.state }));
  }

  _sleep(ms) {
    return new Promise((resolve) => {
      this._wake = resolve;
      if (ms !== null) setTimeout(resolve, ms);
    });
  }
}
