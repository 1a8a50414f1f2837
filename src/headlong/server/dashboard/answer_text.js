/**
 * An answer's text as Markdown, token by token: the blocks are elements, every piece of text stays its token's. What is
 * markup is hidden, not removed, so the elements hold the answer's text to the letter.
 */

import { copyButton } from "./clipboard.js";
import { el } from "./dom.js";
import { blocksOf } from "./markdown.js";
import { TokenText } from "./tokens.js";

export class AnswerText {
  /** @param {HTMLElement} container */
  constructor(container) {
    this.container = container;
    this.text = "";
    /** @type {{to: number, token: import("./answer.js").Token|null}[]} where each piece ends, and whose it is */
    this.pieces = [];
    /** @type {BlockWriter[]} */
    this._writers = [];
  }

  /** Takes pieces; `draw` shows them. @param {import("./answer.js").Piece[]} pieces */
  add(pieces) {
    for (const { text, token } of pieces) {
      this.text += text;
      this.pieces.push({ to: this.text.length, token });
    }
  }

  /** Draws what has changed: the end of the last block as a rule, since text only ever grows at its end. */
  draw() {
    const blocks = blocksOf(this.text);
    let same = 0;
    while (same < blocks.length && this._writers[same]?.goOn(blocks[same])) same += 1;
    for (const writer of this._writers.splice(same)) writer.outer.remove();
    for (const block of blocks.slice(same)) {
      const writer = new BlockWriter(this, block);
      this._writers.push(writer);
      this.container.append(writer.outer);
    }
  }

  /** The number of the first piece that ends after a place; found by halving, since answers are long. */
  pieceAt(place) {
    let low = 0;
    for (let high = this.pieces.length; low < high; ) {
      const middle = (low + high) >> 1;
      if (this.pieces[middle].to > place) high = middle;
      else low = middle + 1;
    }
    return low;
  }
}

/** Fills the elements of one block, in the text's order. */
class BlockWriter {
  /** @param {AnswerText} source */
  constructor(source, block) {
    this._source = source;
    this._at = block.begin;
    this._piece = source.pieceAt(block.begin);
    const { outer, inner } = elementOf(block);
    this.outer = outer;
    this._inner = inner;
    this._tokens = new TokenText(inner, source.pieces[this._piece - 1]?.token);
    this._write(block);
  }

  /** Shows what the block has become; false if that takes other elements. */
  goOn(block) {
    if (JSON.stringify(block) === JSON.stringify(this.drawn)) return true;
    if (!grows(this.drawn, block)) return false;
    this._write(block);
    return true;
  }

  _write(block) {
    this.drawn = block;
    this._fill(block.children, this._inner);
    this._put(block.end, true);
  }

  _fill(children, element) {
    for (const child of children) {
      if (child.tag === undefined) {
        this._tokens.moveTo(element);
        this._put(child.from, true);
        this._put(child.to, false);
      } else {
        const { outer, inner } = elementOf(child);
        element.append(outer);
        this._fill(child.children, inner);
      }
    }
  }

  /** Puts the text up to a place, cut into its tokens. */
  _put(to, hidden) {
    while (this._at < to) {
      const piece = this._source.pieces[this._piece];
      const end = Math.min(to, piece.to);
      this._tokens.put(this._source.text.slice(this._at, end), piece.token, hidden);
      this._at = end;
      if (end === piece.to) this._piece += 1;
    }
  }
}

/** Whether all that was drawn of a block without inner elements still holds, so that only its end is missing. */
function grows(drawn, block) {
  if (drawn.tag !== block.tag || !["p", "pre"].includes(block.tag) || drawn.language !== block.language) return false;
  if (![...drawn.children, ...block.children].every((child) => child.tag === undefined)) return false;
  const last = drawn.children.length - 1;
  return (
    drawn.children[last]?.to === drawn.end &&
    drawn.children.every(({ from, to }, i) => {
      const now = block.children[i];
      return now?.from === from && (i < last ? now.to === to : now.to >= to);
    })
  );
}

/** The element of a node, and where inside it the text goes. */
function elementOf({ tag, attributes, align, start, language }) {
  if (tag === "pre") {
    const inner = el("code");
    const copy = copyButton(() => shownText(inner), "Copy the code");
    const caption = el("figcaption", {}, el("span", {}, language || "code"), copy);
    return { outer: el("figure", { class: "code" }, caption, el("pre", { tabindex: 0 }, inner)), inner };
  }
  const kind = tag === "hr" ? { class: "rule", role: "separator" } : { class: align === "left" ? null : align };
  const inner = el(tag === "hr" ? "div" : tag, { ...attributes, ...kind, start: start > 1 ? start : null });
  return { outer: tag === "table" ? el("div", { class: "table", tabindex: 0 }, inner) : inner, inner };
}

/** The text of code without refused drafts and without the signs around it. */
function shownText(element) {
  const copy = element.cloneNode(true);
  copy.querySelectorAll(".markup, .refused").forEach((one) => one.remove());
  return copy.textContent;
}
