/** The table of replicas in the live view, from the statistics' snapshots. Hidden where one engine serves alone. */

import { byId, el } from "./dom.js";
import { clock, number, percent, plural } from "./format.js";

export function showReplicas(replicas) {
  byId("replicas").hidden = !replicas.length;
  if (!replicas.length) return;
  byId("replicas-sum").textContent = summary(replicas);
  byId("replicas-body").replaceChildren(...replicas.map(row));
}

function summary(replicas) {
  const count = (state) => replicas.filter((one) => one.state === state).length;
  const sum = (field) => replicas.reduce((total, one) => total + (one[field] ?? 0), 0);
  const parts = [`${number(count("ready"))} of ${plural(replicas.length - count("lost"), "replica")} ready`];
  if (count("lost")) parts.push(`${number(count("lost"))} lost`);
  parts.push(`${percent(sum("cached_tokens"), sum("asked_tokens"))} of the prompts' tokens from a cache`);
  parts.push(`${plural(sum("taken_over"), "stream")} resumed`);
  return `${parts.join(", ")}.`;
}

function row(one) {
  const lost = one.state === "lost";
  const now = (value) => (lost ? "–" : number(value));
  const cells = [
    ["cut id", one.id],
    [one.why ? "long" : "", one.why ? `${one.state}: ${one.why}` : one.state],
    ["", one.node || "–"],
    ["", clock(one.started)],
    ["n", now(one.running)],
    ["n", now(one.waiting)],
    ["n", now(one.tokens_per_second)],
    ["n", percent(one.cached_tokens, one.asked_tokens)],
    ["n", percent(one.accepted, one.drafted)],
    ["n", lost ? "–" : percent(one.pages_used, one.pages_total)],
    ["n", number(one.requests)],
    ["n", number(one.taken_over)],
    ["n", number(one.repeated)],
  ];
  const cell = ([kind, text]) => el("td", { class: kind || null, title: kind.startsWith("cut") ? text : null }, text);
  return el("tr", { class: one.state }, ...cells.map(cell));
}
