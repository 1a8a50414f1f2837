/** The tools a reader offers, the calls a model answers with, and a place for their results. */

import { byId, el } from "./dom.js";
import { SettingError } from "./settings.js";

const EXAMPLE = [
  {
    type: "function",
    function: {
      name: "get_weather",
      description: "The weather in a city now.",
      parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
    },
  },
];

export function wireTools() {
  byId("tools-example").addEventListener("click", () => {
    byId("tools").value = JSON.stringify(EXAMPLE, null, 2);
    byId("tools").focus();
  });
}

/**
 * The tools a request offers: a list, each as OpenAI writes them or its `function` alone.
 * @throws {SettingError}
 */
export function toolFields() {
  const text = byId("tools").value.trim();
  if (!text) return {};
  let tools;
  try {
    tools = JSON.parse(text);
  } catch (error) {
    throw wrong(error.message);
  }
  if (!Array.isArray(tools)) throw wrong("a list is needed, [{…}, …]");
  return { tools: tools.map((tool) => (tool?.name ? { type: "function", function: tool } : tool)) };
}

function wrong(why) {
  byId("tools").focus();
  return new SettingError(`Tools must be JSON: ${why}.`);
}

/** The calls of an answer. */
export class ToolCallsView {
  /** @param {(results: object[]) => void} onResults gets the messages that answer the calls */
  constructor(onResults) {
    this.element = el("div", { class: "tools" });
    this._onResults = onResults;
  }

  /** @param {import("./answer.js").Answer} answer */
  draw({ toolCalls }) {
    this.element.replaceChildren(...toolCalls.filter(Boolean).map(callFigure));
  }

  /** Asks for the results of calls that are complete. */
  ask({ calls }) {
    if (!calls.length) return;
    const fields = calls.map(({ id, name }) => {
      const field = el("textarea", { rows: 2, required: true, placeholder: '{"temperature": 21}' });
      return { id, field, label: el("label", {}, `Result of ${name}`, field) };
    });
    const labels = fields.map(({ label }) => label);
    const form = el("form", { class: "results" }, ...labels, el("button", {}, "Send results"));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this._onResults(fields.map(({ id, field }) => ({ role: "tool", tool_call_id: id, content: field.value })));
    });
    this.element.append(form);
  }
}

function callFigure(call) {
  return el(
    "figure",
    { class: "tool" },
    el("figcaption", {}, "Tool call: ", el("b", {}, call.name)),
    el("pre", { tabindex: 0, "aria-label": `Arguments of ${call.name}` }, indented(call.arguments)),
  );
}

/** JSON on lines of its own, where that changes nothing but white space; numbers may be too long for JavaScript. */
function indented(text) {
  try {
    const value = JSON.parse(text);
    const bare = (json) => json.replace(/\s/g, "");
    return bare(JSON.stringify(value)) === bare(text) ? JSON.stringify(value, null, 2) : text;
  } catch {
    return text; // not all of it has come yet, or it is no JSON
  }
}
