/** Joins the views: which one is shown, what the server is, and the statistics that feed them all. */

import { offerKey, showConnection, wireKeyDialog } from "./connection.js";
import { byId } from "./dom.js";
import { number, percent } from "./format.js";
import { LiveView } from "./live.js";
import { ModelChoice } from "./model_choice.js";
import { Playground } from "./playground.js";
import { Race } from "./race.js";
import { Replay } from "./replay.js";
import { offerDefaults, offerDepths } from "./settings.js";
import { StatsFeed } from "./stats.js";
import { explainTokens } from "./tokens.js";

const VIEWS = { playground: "Playground", replay: "Step through", race: "Race", live: "Live" };

/** What the last snapshot said. */
const server = { running: 0, mtp: null, sampling: null };
const feed = new StatsFeed();
const live = new LiveView();
const replay = new Replay();
const models = new ModelChoice(showModel);
new Playground(() => models.name, stepThrough);
new Race(() => ({ model: models.name, running: server.running }));

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
  models.serve(snapshot.model);
  offerKey(snapshot.keys);
  byId("model").textContent = snapshot.model ?? "no model loaded";
  byId("no-model").hidden = snapshot.model !== null;
  byId("draining").hidden = !snapshot.draining;
  const { rates, rows, recent_positions: recent = [] } = snapshot;
  const sum = (field) => recent.reduce((total, position) => total + position[field], 0);
  byId("now-speed").textContent = number(rates?.tokens_per_second, 0);
  byId("now-rows").textContent = rows ? `${rows.running}/${rows.max}` : "–";
  byId("now-accepted").textContent = percent(sum("accepted"), sum("tried"));
  const { mtp = null, sampling = null } = snapshot;
  Object.assign(server, { running: rows?.running ?? 0, mtp, sampling });
  showModel();
}

/** What depends on the model that answers here, which need not be the one the statistics are of. */
function showModel() {
  const mtp = models.mtp ?? server.mtp;
  byId("live-model").hidden = models.isServed;
  byId("live-model").textContent = `The figures of ${byId("model").textContent}, the model that serves by default.`;
  offerDefaults(models.isServed ? server.sampling : null);
  byId("no-mtp").hidden = mtp?.available ?? true;
  byId("no-mtp-reason").textContent = mtp?.reason ?? "the server gives no reason";
  byId("race-start").disabled = !mtp?.available;
  if (mtp) offerDepths(mtp);
}

feed.addEventListener("snapshot", ({ detail }) => {
  showServer(detail);
  if (detail.model !== null) live.add(detail);
});
showConnection(feed);
wireKeyDialog(() => {
  feed.retryNow();
  models.refresh();
});
explainTokens(document.body);
window.addEventListener("hashchange", showView);
window.addEventListener("online", () => feed.retryNow());
byId("controls").open = matchMedia("(min-width: 900px)").matches;
byId("meaning").open = byId("controls").open;
showView();
models.refresh();
feed.run();
