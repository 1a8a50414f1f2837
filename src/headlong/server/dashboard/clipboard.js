/** Buttons that copy text, also where the page is not served over a secure connection. */

import { el } from "./dom.js";

const SHOWN_MS = 1500;

/**
 * @param {() => string} text what to copy, read when the button is pressed
 * @param {string} label the button's name where "Copy" alone does not say of what
 */
export function copyButton(text, label) {
  const button = el("button", { type: "button", class: "small copy", "aria-label": label }, "Copy");
  button.addEventListener("click", async () => {
    const copied = await copy(text());
    button.textContent = copied ? "Copied" : "Not copied";
    button.setAttribute("aria-label", button.textContent);
    setTimeout(() => {
      button.textContent = "Copy";
      button.setAttribute("aria-label", label);
    }, SHOWN_MS);
  });
  return button;
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copyBySelection(text); // browsers keep the clipboard from pages without TLS
  }
}

function copyBySelection(text) {
  const focused = document.activeElement;
  const field = el("textarea", { class: "unseen", "aria-hidden": "true" });
  field.value = text;
  document.body.append(field);
  field.select();
  const copied = document.execCommand("copy");
  field.remove();
  focused?.focus();
  return copied;
}
