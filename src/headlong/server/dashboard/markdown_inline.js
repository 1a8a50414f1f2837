/**
 * Finds the emphasis, code and links inside one run of Markdown text. Knows no blocks and no page.
 *
 * @typedef {{from: number, to: number}} Leaf text to show, as a range of the text that was read
 * @typedef {{tag: string, attributes?: object, children: Inline[]}} Span
 * @typedef {Leaf|Span} Inline
 *
 * What lies between the leaves is markup. Reading takes time in proportion to the text, whatever is in it: a mark that
 * was once looked for in vain is not looked for again.
 */

const PAIRS = { "**": "strong", __: "strong", "~~": "s", "*": "em", _: "em" };
const MARKS = ["**", "__", "~~", "*", "_"];
const ESCAPABLE = /[!-/:-@[-`{-~]/;
const LINK = /\[([^[\]\n]{1,500})\]\(([^\s()<>]{1,2000})\)/y;

/** @returns {Inline[]} */
export function inlineOf(text) {
  return new Reader(text).read(0, text.length, new Set());
}

class Reader {
  constructor(text) {
    this._text = text;
  }

  /** @param {Set<string>} open tags around this range, which do not open again inside themselves */
  read(from, to, open) {
    const nodes = [];
    const missing = new Set();
    let shown = from;
    let at = from;
    const flush = (end) => end > shown && nodes.push({ from: shown, to: end });
    while (at < to) {
      const found = this._markup(at, to, open, missing);
      if (!found) {
        at += 1;
        continue;
      }
      flush(at);
      nodes.push(found.node);
      shown = at = found.end;
    }
    flush(to);
    return nodes;
  }

  /** The markup that begins exactly here, if any. */
  _markup(at, to, open, missing) {
    const sign = this._text[at];
    if (sign === "\\" && at + 1 < to && ESCAPABLE.test(this._text[at + 1]))
      return { node: { from: at + 1, to: at + 2 }, end: at + 2 };
    if (sign === "`") return this._code(at, to, missing);
    if (sign === "[") return this._link(at, to, open);
    if (sign === "*" || sign === "_" || sign === "~") return this._emphasis(at, to, open, missing);
    return null;
  }

  _code(at, to, missing) {
    let ticks = 1;
    while (this._text[at + ticks] === "`") ticks += 1;
    const literal = { node: { from: at, to: Math.min(to, at + ticks) }, end: Math.min(to, at + ticks) };
    const key = `code ${ticks}`;
    if (missing.has(key)) return literal;
    for (let end = at + ticks; end < to; ) {
      if (this._text[end] !== "`") {
        end += 1;
        continue;
      }
      let run = 1;
      while (this._text[end + run] === "`") run += 1;
      if (run === ticks && end + run <= to)
        return { node: { tag: "code", children: [{ from: at + ticks, to: end }] }, end: end + run };
      end += run;
    }
    missing.add(key);
    return literal;
  }

  _link(at, to, open) {
    LINK.lastIndex = at;
    const match = LINK.exec(this._text);
    if (!match || LINK.lastIndex > to || open.has("a") || !isWebAddress(match[2])) return null;
    const attributes = { href: match[2], title: match[2], target: "_blank", rel: "noopener noreferrer" };
    const children = this.read(at + 1, at + 1 + match[1].length, new Set([...open, "a"]));
    return { node: { tag: "a", attributes, children }, end: at + match[0].length };
  }

  _emphasis(at, to, open, missing) {
    const mark = MARKS.find((one) => this._text.startsWith(one, at));
    const tag = PAIRS[mark];
    if (!tag || open.has(tag) || missing.has(mark)) return null;
    const inside = at + mark.length;
    if (inside >= to || /\s/.test(this._text[inside])) return null;
    // Not in a snake_case_name, nor in 2*3*4.
    if (this._isWord(at - 1) && (mark[0] === "_" || (mark === "*" && this._isWord(inside)))) return null;
    const close = this._closing(mark, inside, to);
    if (close < 0) {
      missing.add(mark);
      return null;
    }
    return { node: { tag, children: this.read(inside, close, new Set([...open, tag])) }, end: close + mark.length };
  }

  /** Where a mark closes: after something, and for a single sign not at one half of a double one. */
  _closing(mark, inside, to) {
    for (let at = inside + 1; at + mark.length <= to; at++) {
      if (!this._text.startsWith(mark, at)) continue;
      if (mark.length === 1 && this._text[at + 1] === mark) {
        at += 1;
        continue;
      }
      if (/\s/.test(this._text[at - 1]) || (mark[0] === "_" && this._isWord(at + mark.length))) continue;
      return at;
    }
    return -1;
  }

  _isWord(at) {
    return at >= 0 && at < this._text.length && /[\p{L}\p{N}]/u.test(this._text[at]);
  }
}

function isWebAddress(text) {
  try {
    return ["http:", "https:"].includes(new URL(text).protocol);
  } catch {
    return false;
  }
}
