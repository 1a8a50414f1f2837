/**
 * Finds the blocks of a Markdown text: paragraphs, headings, lists, quotes, tables and code. Knows no page.
 *
 * @typedef {import("./markdown_inline.js").Inline} Inline
 * @typedef {object} Block
 * @property {string} tag
 * @property {string} [language] of a block of code
 * @property {string} [align] of a cell
 * @property {(Block|Inline)[]} children whose leaves are ranges of the whole text, in its order
 * @property {number} [begin] of a block that is inside no other: where it begins in the text
 * @property {number} [end] and where it ends, with the blank lines after it
 *
 * A line is a range of the text without its line break. Blocks inside others see their lines without the signs in front
 * of them, so that nothing has to be cut out of the text: what no leaf covers is markup.
 */

import { inlineOf } from "./markdown_inline.js";

const MAX_DEPTH = 6;
const FENCE = /^ {0,3}(`{3,}|~{3,}) {0,3}([\w+#.-]{0,30})[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(?=\S)/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?: {1,4}(?=\S)|\s*$)/;
/** An item that may follow a paragraph without a blank line: not the year at the start of a line. */
const FIRST_ITEM = /^ *(?:[-*+]|1[.)]) +\S/;
const MAX_ROW = 2000;
const TABLE_RULE = /^\s*\|?\s*:?-+:?\s*(?:\|\s*:?-+:?\s*)*\|?\s*$/;

/** @returns {Block[]} the blocks of a text, which cover it from its first character to its last */
export function blocksOf(text) {
  const blocks = new Reader(text).read(linesOf(text), 0);
  const begins = [0, ...blocks.slice(1).map((block) => block.begin), text.length];
  return blocks.map((block, i) => ({ ...block, begin: begins[i], end: begins[i + 1] }));
}

function linesOf(text) {
  const lines = [];
  for (let from = 0; from <= text.length; ) {
    const end = text.indexOf("\n", from);
    const to = end < 0 ? text.length : end;
    lines.push({ from, to });
    from = to + 1;
  }
  return lines;
}

class Reader {
  constructor(text) {
    this._text = text;
  }

  read(lines, depth) {
    const blocks = [];
    let at = 0;
    while (at < lines.length) {
      if (this._isBlank(lines[at])) {
        at += 1;
        continue;
      }
      const [block, next] = this._block(lines, at, depth);
      blocks.push({ ...block, begin: lines[at].from });
      at = next;
    }
    return blocks;
  }

  /** The block that begins at a line, and the line after it. */
  _block(lines, at, depth) {
    const line = this._of(lines[at]);
    if (FENCE.test(line)) return this._code(lines, at);
    const heading = HEADING.exec(line);
    if (heading) {
      const { from, to } = lines[at];
      // The page's own headings come before an answer's.
      const tag = `h${Math.min(6, heading[1].length + 3)}`;
      return [{ tag, children: this._inline([{ from: from + heading[0].length, to }]) }, at + 1];
    }
    if (RULE.test(line)) return [{ tag: "hr", children: [] }, at + 1];
    if (this._isTable(lines, at)) return this._table(lines, at);
    if (depth < MAX_DEPTH && QUOTE.test(line)) return this._quote(lines, at, depth);
    if (depth < MAX_DEPTH && ITEM.test(line)) return this._list(lines, at, depth);
    let next = at + 1;
    while (next < lines.length && !this._isBlank(lines[next]) && !this._begins(lines, next, depth)) next += 1;
    return [{ tag: "p", children: this._inline(lines.slice(at, next)) }, next];
  }

  /** Whether something other than the paragraph before it begins at a line. */
  _begins(lines, at, depth) {
    const line = this._of(lines[at]);
    if (FENCE.test(line) || HEADING.test(line) || RULE.test(line) || this._isTable(lines, at)) return true;
    return depth < MAX_DEPTH && (QUOTE.test(line) || FIRST_ITEM.test(line));
  }

  _code(lines, at) {
    const [, fence, language] = FENCE.exec(this._of(lines[at]));
    const closes = (line) => line.trim().startsWith(fence) && !line.trim().replaceAll(fence[0], "");
    let end = at + 1;
    while (end < lines.length && !closes(this._of(lines[end]))) end += 1;
    // Every line but the last is shown with its line break.
    const shown = lines.slice(at + 1, end).map(({ from, to }, i) => ({ from, to: at + i + 2 < end ? to + 1 : to }));
    return [{ tag: "pre", language, children: shown.filter(({ from, to }) => to > from) }, end + 1];
  }

  _quote(lines, at, depth) {
    let next = at;
    const inner = [];
    for (let match; next < lines.length && (match = QUOTE.exec(this._of(lines[next]))); next++)
      inner.push({ from: lines[next].from + match[0].length, to: lines[next].to });
    return [{ tag: "blockquote", children: this.read(inner, depth + 1) }, next];
  }

  _list(lines, at, depth) {
    const [, indent, sign] = ITEM.exec(this._of(lines[at]));
    const ordered = /\d/.test(sign);
    const items = [];
    let next = at;
    while (next < lines.length) {
      const match = ITEM.exec(this._of(lines[next]));
      if (!match || match[1].length > indent.length + 1 || /\d/.test(match[2]) !== ordered) break;
      if (RULE.test(this._of(lines[next]))) break;
      const [item, after] = this._item(lines, next, match);
      items.push({ tag: "li", children: tight(this.read(item, depth + 1)) });
      next = after;
    }
    const start = ordered ? Number.parseInt(sign, 10) : 1;
    return [{ tag: ordered ? "ol" : "ul", start, children: items }, next];
  }

  /** The lines of one item: indented ones, and those that go on with its paragraph. */
  _item(lines, at, match) {
    const { from, to } = lines[at];
    const inner = [{ from: Math.min(to, from + match[0].length), to }];
    const least = match[1].length + 2;
    let next = at + 1;
    for (; next < lines.length; next++) {
      const line = this._of(lines[next]);
      const indent = line.length - line.trimStart().length;
      if (this._isBlank(lines[next])) {
        const more = lines.slice(next, next + 3).find((one) => !this._isBlank(one));
        if (!more || !/^\s{2,}/.test(this._of(more)) || this._indent(more) < least) break;
      } else if (indent < least) {
        if (this._isBlank(lines[next - 1]) || ITEM.test(line) || this._begins(lines, next, 0)) break;
      }
      inner.push({ from: lines[next].from + Math.min(indent, match[0].length), to: lines[next].to });
    }
    while (next < lines.length && this._isBlank(lines[next])) next += 1;
    return [inner, next];
  }

  _isTable(lines, at) {
    if (at + 1 >= lines.length) return false;
    const [head, rule] = [this._of(lines[at]), this._of(lines[at + 1])];
    if (!head.includes("|") || !rule.includes("|") || rule.length > MAX_ROW || !TABLE_RULE.test(rule)) return false;
    return this._cells(lines[at]).length === this._cells(lines[at + 1]).length;
  }

  _table(lines, at) {
    const aligns = this._cells(lines[at + 1]).map(({ from, to }) => {
      const rule = this._text.slice(from, to);
      return rule.endsWith(":") ? (rule.startsWith(":") ? "center" : "right") : "left";
    });
    const row = (tag, line) => ({
      tag: "tr",
      children: this._cells(line)
        .slice(0, aligns.length)
        .map((cell, i) => ({ tag, align: aligns[i], children: this._inline([cell]) })),
    });
    let next = at + 2;
    while (next < lines.length && this._of(lines[next]).includes("|")) next += 1;
    const body = { tag: "tbody", children: lines.slice(at + 2, next).map((line) => row("td", line)) };
    return [{ tag: "table", children: [{ tag: "thead", children: [row("th", lines[at])] }, body] }, next];
  }

  /** The cells of a row as ranges without the space around them. */
  _cells({ from, to }) {
    const cells = [];
    let begin = from;
    for (let at = from; at <= to; at++) {
      if (at < to && (this._text[at] !== "|" || this._text[at - 1] === "\\")) continue;
      const cell = this._text.slice(begin, at);
      const outside = (begin === from || at === to) && !cell.trim();
      const left = begin + cell.length - cell.trimStart().length;
      const text = cell.trim();
      if (!outside) cells.push(text ? { from: left, to: left + text.length } : { from: begin, to: begin });
      begin = at + 1;
    }
    return cells;
  }

  /** Inline markup of lines that belong together. */
  _inline(lines) {
    const text = lines.map((line) => this._of(line)).join("\n");
    return toSource(inlineOf(text), lines);
  }

  _indent(line) {
    const text = this._of(line);
    return text.length - text.trimStart().length;
  }

  _of({ from, to }) {
    return this._text.slice(from, to);
  }

  _isBlank(line) {
    return !this._of(line).trim();
  }
}

/** An item of one paragraph needs no paragraph around its text. */
function tight(blocks) {
  return blocks[0]?.tag === "p" ? [...blocks[0].children, ...blocks.slice(1)] : blocks;
}

/** Ranges of joined lines as ranges of the text the lines came from. */
function toSource(nodes, lines) {
  const starts = [];
  let length = 0;
  for (const { from, to } of lines) {
    starts.push(length);
    length += to - from + 1;
  }
  let line = 0;
  const place = (node) => {
    if (node.tag) return [{ ...node, children: node.children.flatMap(place) }];
    const leaves = [];
    for (let at = node.from; at < node.to; ) {
      while (line + 1 < lines.length && starts[line + 1] <= at) line += 1;
      const end = Math.min(node.to, starts[line + 1] ?? length);
      const shift = lines[line].from - starts[line];
      leaves.push({ from: at + shift, to: end + shift });
      at = end;
    }
    return leaves;
  };
  return nodes.flatMap(place);
}
