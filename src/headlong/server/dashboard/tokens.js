/**
 * Shows text token by token: each its own span, marked by who it came from, with an explanation on hover and
 * focus. Knows answers, not where they come from.
 */

import { byId, el } from "./dom.js";
import { inLine, plural, quoted } from "./format.js";

/** @type {WeakMap<Element, import("./answer.js").Token>} */
const tokenOf = new WeakMap();

/** Appends pieces of an answer to an element as they come, or to one element after the other. */
export class TokenText {
  /**
   * @param {HTMLElement} container
   * @param {import("./answer.js").Token|null} [before] the last token that was shown elsewhere
   */
  constructor(container, before = null) {
    this.container = container;
    this._token = before;
    this._last = null;
  }

  /** Goes on in another element. */
  moveTo(container) {
    if (container === this.container) return;
    this.container = container;
    this._last = null;
  }

  /** @param {import("./answer.js").Piece[]} pieces */
  append(pieces) {
    for (const { text, token } of pieces) this.put(text, token);
  }

  /** Adds a piece of a token's text; `hidden` for markup, which is there and takes no room. */
  put(text, token, hidden = false) {
    if (!token || !this._last || tokenOf.get(this._last) !== token) {
      if (token !== this._token) this.container.append(...refusedBefore(token));
      this._token = token;
      this.container.append((this._last = tokenSpan(token, hidden)));
    }
    if (!hidden) this._last.classList.remove("markup");
    this._last.append(hidden ? el("span", { class: "markup" }, text) : text);
  }
}

/** One token's span. Of a container only one is a tab stop; arrow keys reach the others. */
function tokenSpan(token, hidden) {
  const origin = token ? (token.drafted ? "drafted" : "own") : "untraced";
  const span = el("span", { class: `tok ${origin}${hidden ? " markup" : ""}` });
  if (token) {
    tokenOf.set(span, token);
    span.tabIndex = -1;
  }
  return span;
}

/** The guesses the target put aside in favour of this token; shown where the reader asked for them. */
function refusedBefore(token) {
  if (!token || token.drafted || !token.step.refused.length) return [];
  return token.step.refused.map((text, i) =>
    el("del", { class: i ? "refused unread" : "refused", "aria-label": `refused draft ${text}` }, inLine(text)),
  );
}

export function stepName(step) {
  return step.number ? `Step ${step.number}` : "Prompt";
}

/** What happened to a token, in a sentence or two. */
export function explain(token) {
  const { step } = token;
  if (token.drafted) return "Drafted by the head, and the target agreed.";
  if (!step.number) return "The target's own token, from the pass that read the prompt.";
  if (!step.drafted) return "The target's own token. Nothing was drafted in this step.";
  if (!step.refused.length)
    return `The target's own token. It agreed with ${
      step.drafted === 1 ? "the draft" : `all ${step.drafted} drafts`
    }, so this one came on top.`;
  const after = step.refused.length - 1;
  return (
    `The target's own token. The head had guessed ${quoted(step.refused[0])} here; the target refused it` +
    (after ? ` and dropped the ${plural(after, "guess", "guesses")} after it.` : ".")
  );
}

/** Explains the token under the pointer or the keyboard focus, anywhere inside `root`. */
export function explainTokens(root) {
  const tip = byId("token-tip");
  let shown = null;
  const hide = () => {
    shown?.removeAttribute("aria-describedby");
    shown = null;
    tip.hidden = true;
  };
  const show = (event) => {
    const target = event.target.closest(".tok");
    const token = target && tokenOf.get(target);
    if (!token) return hide();
    hide();
    shown = target;
    shown.setAttribute("aria-describedby", tip.id);
    const place = token.drafted ? `, draft ${token.position} of ${token.step.drafted}` : "";
    tip.replaceChildren(el("strong", {}, `${stepName(token.step)}${place}`), el("br"), explain(token));
    tip.hidden = false;
    putBeside(tip, target);
  };
  root.addEventListener("pointerover", show);
  root.addEventListener("pointerleave", hide);
  root.addEventListener("focusin", show);
  root.addEventListener("focusout", hide);
  root.addEventListener("keydown", (event) => {
    if (event.key === "Escape") hide();
    moveFocus(event);
  });
  // Focus may scroll its token into view; the explanation goes along.
  root.addEventListener("scroll", () => shown && putBeside(tip, shown), true);
}

/** Arrow keys walk the tokens; entering the group lands on its first. */
function moveFocus(event) {
  const forward = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!forward) return;
  const group = event.target.closest(".tokens");
  const from = tokenOf.get(event.target);
  if (!group || (!from && event.target !== group)) return;
  const tokens = [...group.querySelectorAll(".tok[tabindex]:not(.markup)")];
  // A token that markup splits is one stop.
  const stops = tokens.filter((span, i) => !i || tokenOf.get(span) !== tokenOf.get(tokens[i - 1]));
  const next = stops[from ? stops.findIndex((span) => tokenOf.get(span) === from) + forward : 0];
  if (!next) return;
  event.preventDefault();
  next.focus();
}

/** Under the token where there is room, else above; never off the side. */
function putBeside(tip, target) {
  const box = target.getClientRects()[0] ?? target.getBoundingClientRect();
  const left = Math.min(Math.max(8, box.left), window.innerWidth - tip.offsetWidth - 8);
  const below = box.bottom + 6;
  const fits = below + tip.offsetHeight < window.innerHeight;
  tip.style.left = `${left}px`;
  tip.style.top = `${fits ? below : box.top - tip.offsetHeight - 6}px`;
}

