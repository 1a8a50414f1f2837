/**
 * The conversation as data: its turns, the messages a request carries, and the copy that this browser keeps over a
 * reload. Knows no page.
 *
 * @typedef {object} Turn
 * @property {object[]} input the messages that asked: one of the user's, or the results of tools
 * @property {{model: string|null, seed: number, mtp: string|number}} request what the figures' line tells of it
 * @property {Answer} answer
 * @property {string} state `running`, `done`, `stopped` or `failed`
 * @property {string} notice how it ended, where that needs words
 */

import { Answer } from "./answer.js";

export const LEFT = "Stopped by leaving the page.";
const NAME = "headlong-conversation";
/** Browsers give a page about five million characters; other pages of this host may want some. */
const MAX_CHARS = 2_000_000;

export class Conversation {
  constructor() {
    /** @type {Turn[]} */
    this.turns = [];
  }

  /** The messages before a turn. A question without an answer is not part of what the model is shown next. */
  messages(end = this.turns.length) {
    return this.turns.slice(0, end).filter(isAnswered).flatMap(({ input, answer }) => [...input, messageOf(answer)]);
  }

  /** Takes the turns this browser kept; returns the settings that were kept with them, or null. */
  restore() {
    try {
      const kept = JSON.parse(localStorage.getItem(NAME));
      if (!kept) return null;
      this.turns = kept.turns.map((turn) => ({ ...turn, answer: Answer.from(turn.answer) }));
      return kept.settings;
    } catch {
      this.turns = []; // of another version, or damaged
      return null;
    }
  }

  /** Keeps the conversation, of a long one as much of its end as there is room for. */
  keep(settings) {
    const rows = this.turns.map(({ answer, ...turn }) => {
      const state = turn.state === "running" ? "stopped" : turn.state;
      const notice = turn.state === "running" ? LEFT : turn.notice;
      return { ...turn, state, notice, answer };
    });
    for (const kept of shrinking(rows)) if (store(JSON.stringify({ settings, turns: kept }))) return;
    Conversation.forget();
  }

  /** Removes what this browser keeps. */
  static forget() {
    try {
      localStorage.removeItem(NAME);
    } catch {
      // A browser that keeps nothing has nothing to forget.
    }
  }
}

/** First the traces of old answers go, then old turns. */
function* shrinking(rows) {
  yield rows;
  const last = rows.length - 1;
  const plain = rows.map((row) => ({ ...row, answer: row.answer.untraced() }));
  yield rows.map((row, i) => (i < last ? plain[i] : row));
  for (let from = 0; from < plain.length; from += Math.ceil((plain.length - from) / 4)) yield plain.slice(from);
}

function store(text) {
  if (text.length > MAX_CHARS) return false;
  try {
    localStorage.setItem(NAME, text);
    return true;
  } catch {
    return false; // no room, or the browser keeps nothing
  }
}

function isAnswered({ answer }) {
  return answer.text !== "" || answer.calls.length > 0;
}

function messageOf(answer) {
  const message = { role: "assistant", content: answer.text };
  if (!answer.calls.length) return message;
  const calls = answer.calls.map(({ id, ...called }) => ({ id, type: "function", function: called }));
  const reasoning = answer.reasoning ? { reasoning_content: answer.reasoning } : {};
  return { ...message, ...reasoning, tool_calls: calls };
}
