/** Draws one step as columns: what the head guessed, what the target said, what the text got. */

import { beyondEnd, guesses, ownToken } from "./answer.js";
import { el } from "./dom.js";
import { visible } from "./format.js";

const ROWS = ["The head guesses", "The target checks, in one pass", "The text gets"];
const MARKS = {
  taken: ["✓", "agrees"],
  missed: ["✗", "refuses"],
  dropped: ["·", "too late"],
  extra: ["+", "adds"],
  beyond: ["·", "after the end"],
};

/**
 * @param {import("./answer.js").Step} step
 * @param {0|1|2} phase rows up to this one are shown; the last of them is new
 */
export function stageOf(step, phase) {
  const own = ownToken(step);
  const drafts = guesses(step);
  const taken = drafts.length - step.refused.length;
  const columns = drafts.map((text, i) => {
    if (i < taken) return column("taken", text, text, "drafted");
    if (i === taken) return column("missed", text, own?.text ?? null, "own");
    return column("dropped", text, null, "");
  });
  if (beyondEnd(step)) columns.push(column("beyond", `${beyondEnd(step)} more`, null, ""));
  if (own && taken === drafts.length) columns.push(column("extra", null, own.text, "own"));
  const grid = el(
    "div",
    { class: `stage phase-${phase}` },
    el("div", { class: "labels", "aria-hidden": "true" }, ...ROWS.map((label) => el("div", { class: "cell" }, label))),
    ...columns,
  );
  columns.forEach((item, i) => item.style.setProperty("--i", String(i)));
  return grid;
}

function column(kind, guess, result, origin) {
  const [mark, word] = MARKS[kind];
  const sign = el("span", { class: "mark", "aria-hidden": "true" }, mark);
  const verdict = el("div", { class: "cell verdict" }, sign, el("span", {}, word));
  return el(
    "div",
    { class: `column ${kind}` },
    cell("guess", guess, "guessed"),
    verdict,
    cell("kept", result, origin),
  );
}

function cell(row, text, kind) {
  return el("div", { class: `cell ${row}` }, text === null ? "" : el("span", { class: `chip ${kind}` }, visible(text)));
}
