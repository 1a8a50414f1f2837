/** Which of the server's models answers: the list in the header, and loading one that is on the disk only. */

import { getJson, streamPost } from "./api.js";
import { byId, el } from "./dom.js";

export class ModelChoice {
  /** @param {() => void} onChange */
  constructor(onChange) {
    this._onChange = onChange;
    /** Undefined until the server has told. */
    this._served = undefined;
    this._chosen = null;
    this._cards = [];
    this._loading = false;
    this._select = byId("model-choice");
    this._select.addEventListener("change", () => this._pick(this._select.value));
    byId("load-model").addEventListener("click", () => this._load(this._select.value));
    byId("load-cancel").addEventListener("click", () => this._draw());
  }

  /** The name that requests carry; null before any is known. */
  get name() {
    return this._chosen ?? this._served ?? this._loaded()[0]?.id ?? null;
  }

  /** Whether it is the one that the server's statistics are of. */
  get isServed() {
    return !this._served || this.name === this._served;
  }

  /** How the model drafts, from its card; null where the server's statistics tell it. */
  get mtp() {
    return this.isServed ? null : (this._cardOf(this.name)?.headlong?.mtp ?? null);
  }

  /** The model that answers by default, or null where none is loaded; another one means another list. */
  serve(name) {
    if (name === this._served) return;
    this._served = name;
    this.refresh();
  }

  async refresh() {
    const { data } = await getJson("/v1/models").catch(() => ({ data: [] }));
    this._cards = data;
    if (!this._loaded().some((card) => card.id === this._chosen)) this._chosen = null;
    if (!this._loading) this._draw();
    this._onChange();
  }

  _loaded() {
    return this._cards.filter((card) => card.headlong?.loaded !== false);
  }

  _cardOf(name) {
    return this._cards.find((card) => card.id === name);
  }

  _draw() {
    const loaded = new Set(this._loaded());
    const label = (card) => (loaded.has(card) ? card.id : `${card.id} (not loaded)`);
    const options = this._cards.map((card) => new Option(label(card), card.id));
    const isChoice = this._cards.length > 1 || (options.length > 0 && !loaded.size);
    if (!loaded.size) options.unshift(new Option("no model loaded", ""));
    this._select.replaceChildren(...options);
    this._select.value = this.name ?? "";
    this._select.hidden = !isChoice;
    byId("model").hidden = isChoice;
    byId("load-note").hidden = true;
  }

  _pick(name) {
    const isLoaded = this._loaded().some((card) => card.id === name);
    byId("load-note").hidden = isLoaded || !name;
    if (isLoaded) {
      this._chosen = name;
      this._onChange();
    } else this._say(`${name} is not loaded. The server loads it for everybody; others may have to make room.`, true);
  }

  async _load(name) {
    this._loading = true;
    this._say(`Loading ${name} …`);
    let failure = null;
    try {
      for await (const { label, done, total } of streamPost("/v1/model/load", { model_name: name }))
        if (total) this._say(`Loading ${name}: ${label}, ${Math.floor((100 * done) / total)}%`);
      this._chosen = name;
    } catch (error) {
      failure = `${name} was not loaded: ${error.message}`;
    }
    this._loading = false;
    await this.refresh();
    if (failure) this._say(failure);
  }

  _say(message, asks = false) {
    byId("load-note").hidden = false;
    byId("load-text").replaceChildren(el("span", {}, message));
    byId("load-model").hidden = !asks;
    byId("load-cancel").hidden = this._loading;
    byId("load-cancel").textContent = asks ? "Cancel" : "Close";
  }
}
