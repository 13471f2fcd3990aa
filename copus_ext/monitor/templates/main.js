// All of it: draws everything, listens to the reader, and follows a run.

function drawAll() {
  page.figures.forEach(drawFigure);
  fillLandscape();
}
function fillAll() {
  byId("made").textContent = page.made;
  const hasTokens = page.runs.some((run) => run.tokens_per_sample);
  document.querySelector("#axis input[value=tokens]").disabled = !hasTokens;
  fillFacts();
  drawAll();
  fillTables();
  fillJournal();
}

function on(id, event, action) { byId(id).addEventListener(event, action); }
on("axis", "change", (event) => {
  chosen.axis = event.target.value;
  page.figures.filter((figure) => figure.axis).forEach(drawFigure);
});
on("landscape-run", "change", (event) => {
  chosen.run = Number(event.target.value);
  chosen.decision = null;
  fillLandscape();
});
on("landscape-pick", "change", (event) => pick(Number(event.target.value)));
on("landscape-only", "change", fillLandscape);
const walk = (by) => () => {
  const items = shownItems();
  const next = items[items.indexOf(currentItem()) + by];
  if (next) pick(next.iteration);
};
on("landscape-back", "click", walk(-1));
on("landscape-next", "click", walk(1));
const anew = () => { chosen.journalPage = 0; fillJournal(); };
["journal-group", "journal-run", "journal-newest"].forEach((id) => on(id, "change", anew));
on("journal-words", "input", anew);
on("journal-back", "click", () => { chosen.journalPage -= 1; fillJournal(); });
on("journal-next", "click", () => { chosen.journalPage += 1; fillJournal(); });
darkness.addEventListener("change", drawAll);
window.addEventListener("beforeprint", () => {
  isPrinting = true;
  rowsPerPage = 2000;
  fillJournal();
  drawAll();
});
window.addEventListener("afterprint", () => {
  isPrinting = false;
  rowsPerPage = 100;
  fillJournal();
  drawAll();
});
let wasNarrow = window.innerWidth < 700;
window.addEventListener("resize", () => {
  const isNarrow = window.innerWidth < 700;
  if (isNarrow !== wasNarrow) drawAll();
  wasNarrow = isNarrow;
});

// A page that follows a run reloads itself and keeps what its reader has set.
const KEPT = "copus " + location.pathname;
const fields = () => document.querySelectorAll("select[id], input[id]");
const plots = () => [...document.querySelectorAll(".plot")].filter((plot) => plot.layout);
const axesOf = (plot) => Object.keys(plot.layout).filter((name) => /^[xy]axis\d*$/.test(name));

function keep() {
  const zooms = plots().map((plot) => [plot.id, axesOf(plot)
    .filter((name) => plot.layout[name].autorange === false)
    .map((name) => [`${name}.range`, plot.layout[name].range])]);
  const values = [...fields()].map((field) =>
    [field.id, field.type === "checkbox" ? field.checked : field.value]);
  const opened = [...document.querySelectorAll("#facts details")].map((box) => box.open);
  sessionStorage.setItem(KEPT, JSON.stringify(
    { chosen, zooms, values, opened, y: window.scrollY }));
}

function restore() {
  const kept = JSON.parse(sessionStorage.getItem(KEPT) || "null");
  sessionStorage.removeItem(KEPT);
  if (!kept) return;
  Object.assign(chosen, kept.chosen);
  document.querySelector(`#axis input[value=${chosen.axis}]`).checked = true;
  const set = ([id, value]) => {
    const field = byId(id);
    if (field && field.type === "checkbox") field.checked = value;
    else if (field && id !== "landscape-pick") field.value = value;
  };
  kept.values.forEach(set);
  fillAll();
  document.querySelectorAll("#facts details").forEach((box, i) => { box.open = kept.opened[i]; });
  for (const [id, ranges] of kept.zooms) {
    if (ranges.length && byId(id)) untilDrawn(Plotly.relayout(id, Object.fromEntries(ranges)));
  }
  window.scrollTo(0, kept.y);
}

let touched = 0;
["keydown", "pointerdown", "wheel"].forEach((event) =>
  window.addEventListener(event, () => { touched = Date.now(); }, { passive: true }));

function tellAge() {
  const age = Math.round(Date.now() / 1000 - page.made_t);
  const isLate = age > 10 + 3 * page.reload_s;
  byId("live").textContent = isLate ? `Written ${age} s ago: report --follow has ended.`
    : `Updates itself every ${page.reload_s} s.`;
  byId("live").className = isLate ? "bad" : "";
}
function follow() {
  tellAge();
  const now = Date.now();
  if (document.hidden || now - opened < 1000 * page.reload_s || now - touched < 2000) return;
  keep();
  window.location.reload();
}

const opened = Date.now();
byId("journal-newest").checked = page.reload_s !== null;
fillAll();
if (page.reload_s !== null) {
  restore();
  tellAge();
  window.setInterval(follow, Math.min(1000 * page.reload_s, 1000));
}
Promise.allSettled([...drawing]).then(() => { document.documentElement.dataset.ready = "yes"; });
