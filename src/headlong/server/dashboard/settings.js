/** The controls beside the playground: sampling, drafting, the system prompt. Turns them into request fields. */

import { byId } from "./dom.js";

const MAX_SEED = 2 ** 31;

/** A control holds something no request can carry; the sentence names it. */
export class SettingError extends Error {}

/** Offers the depths this server can draft, keeping the reader's choice where it still exists. */
export function offerDepths({ available, max_k: maxK }) {
  const select = byId("k");
  const wanted = JSON.stringify([available, maxK]);
  if (select.dataset.offered === wanted) return;
  const choice = select.value;
  const options = [["off", "off (plain decoding)"]];
  if (available) {
    options.unshift(["auto", "auto"]);
    for (let k = 1; k <= maxK; k++) options.push([String(k), String(k)]);
  }
  select.replaceChildren(...options.map(([value, label]) => new Option(label, value)));
  select.value = options.some(([value]) => value === choice) ? choice : options[0][0];
  select.disabled = !available;
  select.dataset.offered = wanted;
}

/** The drafting a request asks for: "auto", "off" or a number. */
export function chosenDepth() {
  const value = byId("k").value || "auto";
  return /^\d+$/.test(value) ? Number(value) : value;
}

/** Shows in empty fields what the server takes in their place. */
export function offerDefaults(sampling) {
  for (const [id, name] of [["temperature", "temperature"], ["top-p", "top_p"]])
    byId(id).placeholder = sampling?.[name] ?? "default";
}

/**
 * Sampling fields of a request; what is empty is the server's to choose. A seed is always sent, so that every answer on
 * the page can be repeated.
 * @throws {SettingError}
 */
export function samplingFields() {
  return {
    temperature: numberIn("temperature", "Temperature"),
    top_p: numberIn("top-p", "Top p"),
    max_tokens: numberIn("max-tokens", "Max tokens"),
    seed: numberIn("seed", "Seed") ?? Math.floor(Math.random() * MAX_SEED),
  };
}

/** The conversation's opening, if the reader wrote one. */
export function systemMessages() {
  const content = byId("system").value.trim();
  return content ? [{ role: "system", content }] : [];
}

/** The number in a field; undefined, which no request carries, where it is empty. */
function numberIn(id, label) {
  const input = byId(id);
  // A browser tells nothing of what it cannot read as a number but this.
  if (input.value.trim() === "" && !input.validity.badInput) return undefined;
  const value = input.value.trim() === "" ? NaN : Number(input.value);
  const { min, max } = input;
  if (!Number.isFinite(value) || (min !== "" && value < Number(min)) || (max !== "" && value > Number(max))) {
    input.focus();
    throw new SettingError(`${label} must be a number${max === "" ? ` from ${min}` : ` from ${min} to ${max}`}.`);
  }
  return value;
}
