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

// A page that follows a run.
let tag = "";
async function look() {
  let said = "";
  try {
    const answer = await fetch("data.json", {
      cache: "no-store", credentials: "same-origin", headers: tag ? { "If-None-Match": tag } : {},
    });
    if (answer.status === 200) {
      page = await answer.json();
      tag = answer.headers.get("ETag") || "";
      fillAll();
    } else if (answer.status !== 304) {
      said = `The server answers ${answer.status}.`;
    }
  } catch (error) {
    said = "The server does not answer; this is the last that was seen.";
  }
  const last = page.runs[0] && page.runs[0].last;
  const age = last ? Math.max(Math.round(Date.now() / 1000 - last), 0) : null;
  const seen = age === null ? "" : `Last record ${age} s ago. `;
  byId("live").textContent = said || `${seen}Updates itself.`;
  byId("live").className = said ? "bad" : "";
  window.setTimeout(look, 1000 * page.poll_s);
}

byId("journal-newest").checked = page.poll_s !== null;
fillAll();
if (page.poll_s !== null) window.setTimeout(look, 1000 * page.poll_s);
document.documentElement.dataset.ready = "yes";
