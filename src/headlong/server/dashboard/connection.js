/** The banner for a lost connection, the mark in the header, and the dialog for the API key. */

import { apiKey } from "./api.js";
import { byId } from "./dom.js";

const NAMES = { connecting: "connecting", live: "live", lost: "connection lost", locked: "key needed" };

/** @param {import("./stats.js").StatsFeed} feed */
export function showConnection(feed) {
  const banner = byId("banner");
  const status = byId("status");
  const countdown = byId("countdown");
  byId("retry").addEventListener("click", () => (feed.state.name === "locked" ? askForKey() : feed.retryNow()));

  const update = () => {
    const { name, message, retryAt } = feed.state;
    status.dataset.state = name;
    status.textContent = NAMES[name];
    if (name === "locked") offerKey(true);
    banner.hidden = name === "live" || name === "connecting";
    if (banner.hidden) return;
    byId("banner-text").textContent = name === "lost" ? `Connection lost. ${message}` : message;
    byId("retry").textContent = name === "lost" ? "Retry now" : "Enter key";
    tick(retryAt);
  };
  const tick = (retryAt) => {
    const left = retryAt === null ? 0 : Math.max(0, Math.ceil((retryAt - Date.now()) / 1000));
    countdown.textContent = retryAt === null ? "" : left ? `Retrying in ${left} s.` : "Retrying …";
  };
  setInterval(() => feed.state.name === "lost" && tick(feed.state.retryAt), 250);
  feed.addEventListener("state", (event) => {
    update();
    if (event.detail.name === "locked") askForKey();
  });
  update();
}

/** Wires the dialog; `onKey` runs after a key was given or taken back. */
export function wireKeyDialog(onKey) {
  const dialog = byId("key-dialog");
  const field = byId("key");
  byId("open-key").addEventListener("click", askForKey);
  byId("key-cancel").addEventListener("click", () => dialog.close());
  byId("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    apiKey.set(field.value.trim());
    dialog.close();
    onKey();
  });
}

/** Offers the dialog where a key makes a difference, or where there is one to take back. */
export function offerKey(wanted) {
  byId("open-key").hidden = !wanted && !apiKey.get();
}

export function askForKey() {
  const dialog = byId("key-dialog");
  if (dialog.open) return;
  byId("key").value = apiKey.get();
  dialog.showModal();
}
