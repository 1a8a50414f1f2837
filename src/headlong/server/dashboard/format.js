/** Numbers and tokens as people read them. Pure functions. */

const DASH = "–";

/** One digit below 10, two for ratios, none above: 3.2, 41, 1,024. */
export function number(value, digits = null) {
  if (value === null || value === undefined || !Number.isFinite(value)) return DASH;
  const places = digits ?? (Number.isInteger(value) || Math.abs(value) >= 100 ? 0 : 1);
  return value.toLocaleString("en", { minimumFractionDigits: places, maximumFractionDigits: places });
}

export function percent(part, whole) {
  return whole ? `${Math.round((100 * part) / whole)}%` : DASH;
}

export function seconds(ms) {
  return ms < 1000 ? `${Math.round(ms)} ms` : `${number(ms / 1000, 1)} s`;
}

export function plural(count, noun, nouns = `${noun}s`) {
  return `${number(count)} ${count === 1 ? noun : nouns}`;
}

export function clock(unixSeconds) {
  return new Date(unixSeconds * 1000).toLocaleTimeString([], { hour12: false });
}

/** A token with its white space made visible, for places where a token stands alone. */
export function visible(text) {
  if (text === "") return "(end)";
  return inLine(text).replace(/^ /, "␣").replace(/ $/, "␣");
}

/** A token in the middle of a sentence. */
export function quoted(text) {
  return text === "" ? "the end of the text" : `“${visible(text)}”`;
}

/** A token among others of a line that it must not break. */
export function inLine(text) {
  return text.replace(/\n/g, "↵").replace(/\t/g, "⇥");
}
