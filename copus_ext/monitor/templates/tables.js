// The facts about runs, what changes brought, the comparison, the journal.

function fillFacts() {
  const parts = [];
  const opened = [...document.querySelectorAll("#facts details")].map((d) => d.open);
  page.runs.forEach((run) => {
    if (page.runs.length > 1) parts.push(make("h3", run.name));
    const list = make("dl", null, { class: "facts" });
    for (const [label, value] of run.facts) list.append(make("dt", label), make("dd", value));
    parts.push(list);
    const add = (title, heads, lines) => {
      if (!lines.length) return;
      const box = make("details");
      const inner = make("div");
      box.append(make("summary", `${title} (${lines.length})`), inner);
      table(inner, `${title} of ${run.name}`, heads, lines);
      parts.push(box);
    };
    add("Launches", ["launch", "began, UTC", "after step", "to step", "layout", "loaded", "ended"],
      run.launches);
    add("Flags", ["flag", "value"], run.flags);
  });
  byId("facts").replaceChildren(...parts);
  document.querySelectorAll("#facts details").forEach((d, i) => { d.open = Boolean(opened[i]); });
}

function fillTables() {
  byId("no-changes").hidden = page.changes.length > 0 || page.has_pauses;
  byId("t-changes").hidden = !page.changes.length;
  const isAlone = page.runs.length < 2;
  // A run that is alone needs no name.
  const columns = (line) => (isAlone ? line.slice(1) : line);
  const shift = isAlone ? 0 : 1;
  table(byId("t-changes"), "Every change that was judged", columns(page.changed),
    page.changes.map(columns), { numbers: [0, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11].map((i) => i + shift) });
  byId("compare").hidden = isAlone;
  byId("to-compare").hidden = isAlone;
  byId("common").textContent = page.common === null ? "" :
    `The lowest loss that all of them reached is ${page.common.toFixed(4)}, by the mean of `
    + "50 steps: the common loss of the table.";
  table(byId("t-compare"), "The runs beside each other", page.compared, page.compare);
  table(byId("t-differing"), "Flags that they do not have alike",
    ["flag", ...page.runs.map((run) => run.name)], page.differing);
}

const GROUPS = { change: "change", stay: "stay", trouble: "trouble", run: "run" };

function journalLines() {
  const group = byId("journal-group").value;
  const run = byId("journal-run").value;
  const words = byId("journal-words").value.toLowerCase().split(/\s+/).filter(Boolean);
  const lines = page.journal.filter((line) => (!group || line[4] === group)
    && (run === "" || line[0] === Number(run))
    && words.every((word) => `${line[2]} ${line[5]} ${line[6]} ${line[9]}`.toLowerCase()
      .includes(word)));
  return byId("journal-newest").checked ? lines.reverse() : lines;
}

function reasonOf(line) {
  const box = make("span", line[5]);
  if (line[6]) box.append(make("span", line[6], { class: "why" }));
  const items = page.landscapes[line[0]].items;
  const isDecision = line[4] === "change" || line[4] === "stay";
  if (isDecision && items.some((item) => item.iteration === line[2])) {
    const link = make("a", "its landscape", { href: "#landscape" });
    link.addEventListener("click", () => {
      chosen.run = line[0];
      byId("landscape-only").checked = false;
      pick(line[2]);
    });
    box.append(" ", link);
  }
  return box;
}

function fillJournal() {
  const kept = byId("journal-run").value;
  byId("journal-run-label").hidden = page.runs.length < 2;
  byId("journal-run").replaceChildren(make("option", "all runs", { value: "" }),
    ...page.runs.map((run, i) => make("option", run.name, { value: i })));
  byId("journal-run").value = kept;
  const lines = journalLines();
  const pages = Math.max(Math.ceil(lines.length / rowsPerPage), 1);
  chosen.journalPage = Math.min(chosen.journalPage, pages - 1);
  const from = chosen.journalPage * rowsPerPage;
  const shown = lines.slice(from, from + rowsPerPage);
  byId("journal-count").textContent = lines.length
    ? `${from + 1} to ${from + shown.length} of ${lines.length}` : "Nothing of that kind.";
  byId("journal-back").disabled = chosen.journalPage === 0;
  byId("journal-next").disabled = chosen.journalPage >= pages - 1;
  const isAlone = page.runs.length < 2;
  const heads = [...(isAlone ? [] : ["run"]), "time, UTC", "step", "what and why",
    "predicted goodput", "needed", "outcome"];
  const cells = shown.map((line) => {
    const cellsOf = [...(isAlone ? [] : [page.runs[line[0]].name]), when(line[1]), line[2],
      reasonOf(line), line[7], share(line[8]), line[9]];
    cellsOf.group = GROUPS[line[4]] || "";
    return cellsOf;
  });
  const shift = isAlone ? 0 : 1;
  table(byId("t-journal"), "Decisions and their outcomes", heads, cells,
    { numbers: [1 + shift, 3 + shift, 4 + shift], mark: (line) => line.group });
}
