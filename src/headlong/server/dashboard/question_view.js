/** What was said to the model, in the conversation: a message that can be copied and edited, or results of tools. */

import { copyButton } from "./clipboard.js";
import { el } from "./dom.js";

export class QuestionView {
  /**
   * @param {object[]} input the messages
   * @param {(text: string) => boolean} onEdit asks again with another text; false if that cannot be
   */
  constructor(input, onEdit) {
    this.text = input.map((message) => message.content).join("\n");
    this._onEdit = onEdit;
    this._said = input.map((message) => el("p", { class: "said" }, message.content));
    const isMessage = input[0].role === "user";
    const edit = { type: "button", class: "small edit", hidden: !isMessage, onClick: () => this._open() };
    this._edit = el("button", edit, "Edit");
    this._acts = el("div", { class: "acts" }, this._edit, copyButton(() => this.text, "Copy the message"));
    const name = isMessage ? "You" : "Results of tools";
    this.element = el("article", { class: "turn question" }, el("h3", {}, name), ...this._said, this._acts);
  }

  _open() {
    const field = el("textarea", { rows: 3, "aria-label": "Edit the message" });
    field.value = this.text;
    const close = () => {
      form.replaceWith(...this._said, this._acts);
      this._edit.focus();
    };
    const cancel = el("button", { type: "button", class: "small", onClick: close }, "Cancel");
    const send = el("button", { class: "primary small" }, "Send");
    const hint = el("p", { class: "quiet" }, "What follows in the conversation is replaced.");
    const form = el("form", { class: "editing" }, field, el("div", { class: "actions" }, send, cancel), hint);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (field.value.trim()) this._onEdit(field.value);
    });
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") close();
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      form.requestSubmit();
    });
    this._acts.remove();
    this._said.slice(1).forEach((one) => one.remove());
    this._said[0].replaceWith(form);
    field.focus();
  }
}
