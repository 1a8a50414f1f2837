/** The live view: charts, meters and the table of past requests, all from the statistics' snapshots. */

import { LineChart, PositionChart } from "./charts.js";
import { byId, el } from "./dom.js";
import { clock, number, percent, plural } from "./format.js";
import { showReplicas } from "./replicas.js";

const WINDOW_S = 120;

export class LiveView {
  constructor() {
    this._samples = [];
    this._speed = new LineChart(
      byId("chart-speed"),
      [{ key: "speed", label: "tokens/s, all rows", kind: "drafted" }],
      { floor: 10, reference: "plain decoding, one row, measured at load" },
    );
    this._depth = new LineChart(
      byId("chart-depth"),
      [
        { key: "drafts", label: "drafts per step (K)", kind: "own", digits: 2 },
        { key: "gain", label: "tokens per step", kind: "drafted", digits: 2 },
      ],
      { floor: 4 },
    );
    this._rows = new LineChart(
      byId("chart-rows"),
      [
        { key: "running", label: "rows running", kind: "drafted" },
        { key: "waiting", label: "waiting", kind: "own" },
      ],
      { floor: 4 },
    );
    this._positions = new PositionChart(byId("chart-positions"));
  }

  /** Takes one snapshot of `/v1/stats`. */
  add(snapshot) {
    const { time, rates, rows } = snapshot;
    // A server whose clock jumped back, or another one on the same address: the old samples mean nothing here.
    if (this._samples.length && time < this._samples.at(-1).time) this._samples = [];
    this._samples.push({
      time,
      speed: rates.tokens_per_second,
      drafts: rates.drafts_per_step,
      gain: rates.tokens_per_step,
      running: rows.running,
      waiting: rows.waiting,
    });
    while (this._samples[0].time < time - WINDOW_S) this._samples.shift();
    this._speed.draw(this._samples, snapshot.plain_tokens_per_second);
    this._depth.draw(this._samples);
    this._rows.draw(this._samples);
    this._positions.draw(snapshot.recent_positions, snapshot.positions);
    showTiles(snapshot);
    showMeters(snapshot);
    showReplicas(snapshot.replicas ?? []);
    showHistory(snapshot.requests);
  }
}

function showTiles({ rates, totals, recent_positions: recent }) {
  const sum = (field) => recent.reduce((total, position) => total + position[field], 0);
  byId("tile-speed").textContent = number(rates.tokens_per_second);
  byId("tile-gain").textContent = number(rates.tokens_per_step, 2);
  byId("tile-accepted").textContent = percent(sum("accepted"), sum("tried"));
  byId("tile-total").textContent = number(totals.completion_tokens ?? 0);
  byId("tile-total-note").textContent = `tokens in ${plural(totals.requests ?? 0, "request")} since load`;
}

function showMeters({ rows, cache }) {
  meter("rows", rows.running, rows.max);
  meter("waiting", rows.waiting, rows.queue_limit);
  meter("pages", cache.pages_used, cache.pages_total);
  meter("slots", cache.slots_used, cache.slots_total);
}

function meter(name, used, total) {
  const bar = byId(`meter-${name}`);
  bar.max = total || 1;
  bar.value = used;
  byId(`meter-${name}-text`).textContent = `${number(used)} of ${number(total)}`;
}

function showHistory(requests) {
  const table = byId("history");
  const newest = requests.map((request) => request.id).join("\n");
  if (table.dataset.newest === newest) return;
  table.dataset.newest = newest;
  byId("history-empty").hidden = requests.length > 0;
  table.replaceChildren(...requests.map(historyRow));
}

function historyRow(request) {
  const depth = request.acceptance_per_position ?? [];
  const cells = [
    ["", clock(request.finished_at)],
    ["cut id", request.id],
    ["", request.endpoint.replace("/v1/", "")],
    ["n", number(request.prompt_tokens)],
    ["n", number(request.completion_tokens)],
    ["n", `${number(request.ttft_ms, 0)} ms`],
    ["n", number(request.tokens_per_second)],
    ["n", number(request.tokens_per_step, 2)],
    ["n", request.drafted ? percent(request.accepted, request.drafted) : "–"],
    ["", depth.map((share) => percent(share, 1)).join(" ") || "–"],
    [request.mtp ? "" : "long", request.mtp ? "on" : `off${request.mtp_reason ? `: ${request.mtp_reason}` : ""}`],
    ["", request.finish_reason ?? "–"],
  ];
  const cell = ([kind, text]) => el("td", { class: kind || null, title: kind.startsWith("cut") ? text : null }, text);
  return el("tr", {}, ...cells.map(cell));
}
