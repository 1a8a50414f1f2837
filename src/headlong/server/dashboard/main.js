/** Joins the views: which one is shown, what the server is, and the statistics that feed them all. */

import { getJson } from "./api.js";
import { showConnection, wireKeyDialog } from "./connection.js";
import { byId } from "./dom.js";
import { number, percent } from "./format.js";
import { LiveView } from "./live.js";
import { Playground } from "./playground.js";
import { Race } from "./race.js";
import { Replay } from "./replay.js";
import { offerDepths } from "./settings.js";
import { StatsFeed } from "./stats.js";
import { explainTokens } from "./tokens.js";

const VIEWS = { playground: "Playground", replay: "Step through", race: "Race", live: "Live" };

const server = { model: null, running: 0 };
const feed = new StatsFeed();
const live = new LiveView();
const replay = new Replay();
new Playground(() => server.model, stepThrough);
new Race(() => server);

function stepThrough(view) {
  location.hash = "replay";
  showView();
  replay.load(view.answer, view.question);
  byId("replay-stage").focus({ preventScroll: true });
}

/** Shows the view the address names; other fragments, such as that of the skip link, change nothing. */
function showView() {
  const name = location.hash.slice(1);
  if (!(name in VIEWS)) return;
  for (const view of Object.keys(VIEWS)) {
    byId(`view-${view}`).hidden = view !== name;
    const link = document.querySelector(`nav a[href="#${view}"]`);
    if (view === name) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = `${VIEWS[name]} · Headlong`;
}

function showServer(snapshot) {
  server.model = snapshot.model;
  byId("model").textContent = snapshot.model ?? "no model loaded";
  byId("draining").hidden = !snapshot.draining;
  if (snapshot.model === null) return;
  server.running = snapshot.rows.running;
  byId("now-speed").textContent = number(snapshot.rates.tokens_per_second, 0);
  byId("now-rows").textContent = `${snapshot.rows.running}/${snapshot.rows.max}`;
  const tried = snapshot.recent_positions.reduce((sum, position) => sum + position.tried, 0);
  const accepted = snapshot.recent_positions.reduce((sum, position) => sum + position.accepted, 0);
  byId("now-accepted").textContent = percent(accepted, tried);
  showMtp(snapshot.mtp);
}

function showMtp(mtp) {
  offerDepths(mtp);
  byId("no-mtp").hidden = mtp.available;
  byId("no-mtp-reason").textContent = mtp.reason ?? "the server gives no reason";
  byId("race-start").disabled = !mtp.available;
}

/** The model's name where no snapshot has told it yet. */
async function askModels() {
  const { data } = await getJson("/v1/models").catch(() => ({ data: [] }));
  server.model ??= data[0]?.id ?? null;
}

feed.addEventListener("snapshot", ({ detail }) => {
  showServer(detail);
  if (detail.model !== null) live.add(detail);
});
showConnection(feed);
wireKeyDialog(() => {
  feed.retryNow();
  askModels();
});
explainTokens(document.body);
window.addEventListener("hashchange", showView);
window.addEventListener("online", () => feed.retryNow());
byId("controls").open = matchMedia("(min-width: 900px)").matches;
byId("meaning").open = byId("controls").open;
showView();
askModels();
feed.run();
