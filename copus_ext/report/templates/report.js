"use strict";
(() => {
  const byId = (id) => document.getElementById(id);
  let page = JSON.parse(byId("data").textContent);
  const chosen = { axis: "steps", run: 0, decision: null, journalPage: 0 };
  let isPrinting = false;
  let rowsPerPage = 100;

  // ---- small parts ------------------------------------------------------------------------

  function make(name, text, attributes) {
    const node = document.createElement(name);
    if (text !== undefined && text !== null) node.textContent = text;
    for (const [key, value] of Object.entries(attributes || {})) node.setAttribute(key, value);
    return node;
  }

  // Plotly reads a little markup in every text: what comes from a run shall be none.
  function plain(text) {
    return String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;")
      .replace(/\n/g, "<br>");
  }
  function plainAll(values) {
    return values.map((v) => (typeof v === "string" ? plain(v) : Array.isArray(v) ? plainAll(v) : v));
  }

  const percent = (share, digits = 1) => (share === null ? "" :
    `${share > 0 ? "+" : share < 0 ? "\u2212" : ""}${Math.abs(100 * share).toFixed(digits)} %`);
  const share = (value) => (value === null ? "" : `${(100 * value).toFixed(1)} %`);
  const few = (value) => (value === null ? "" : Number(value.toPrecision(4)).toString());
  function when(t) {
    if (t === null) return "";
    const date = new Date(1000 * t);
    return Number.isNaN(date.getTime()) ? "" : date.toISOString().slice(0, 19).replace("T", " ");
  }

  /** A table with headers; below 700 px each line becomes a card. */
  function table(place, caption, heads, lines, options) {
    const { numbers = [], mark = null } = options || {};
    const isNumber = (i) => numbers.includes(i);
    // Said aloud, because lines shown as cards are no table to a screen reader else.
    const node = make("table", null, { class: "cards", role: "table" });
    node.append(make("caption", caption));
    const head = make("tr", null, { role: "row" });
    heads.forEach((name, i) => head.append(make("th", name, {
      scope: "col", role: "columnheader", class: isNumber(i) ? "number" : "",
    })));
    const top = make("thead", null, { role: "rowgroup" });
    top.append(head);
    const body = make("tbody", null, { role: "rowgroup" });
    for (const line of lines) {
      const row = make("tr", null, { role: "row", class: mark ? mark(line) : "" });
      heads.forEach((name, i) => {
        const cell = make("td", null, {
          role: "cell", "data-label": name, class: isNumber(i) ? "number" : "",
        });
        const value = line[i];
        if (value instanceof Node) cell.append(value);
        else if (value !== null && value !== undefined) cell.textContent = value;
        row.append(cell);
      });
      body.append(row);
    }
    node.append(top, body);
    const box = make("div", null, {
      class: "scroll", tabindex: "0", role: "region", "aria-label": caption,
    });
    box.append(node);
    place.replaceChildren(box);
  }

  // ---- colours ----------------------------------------------------------------------------

  const LIGHT = ["#0b66c3", "#c2410c", "#15803d", "#7e22ce", "#b91c1c", "#0e7490", "#a16207",
    "#be185d", "#4d7c0f", "#4338ca", "#9a3412", "#115e59", "#86198f"];
  const DARK = ["#6cb2ff", "#ff9d5c", "#5fd38d", "#c99bff", "#ff8a80", "#5fd4e6", "#e6c14f",
    "#ff8fc0", "#b5d96a", "#a5b4fc", "#fdba74", "#5eead4", "#f0abfc"];
  const darkness = window.matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => darkness.matches && !isPrinting;
  const tint = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  function palette(index) {
    const colors = isDark() ? DARK : LIGHT;
    return index < 0 ? tint("--quiet") : colors[index % colors.length];
  }

  function axisStyle() {
    return { gridcolor: tint("--grid"), linecolor: tint("--line"), zeroline: false,
      tickfont: { color: tint("--ink") } };
  }

  function layoutOf(extra, height) {
    const isNarrow = window.innerWidth < 700;
    const layout = {
      height, autosize: true, uirevision: "keep", hovermode: "closest", showlegend: true,
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: tint("--ink"), size: isNarrow ? 11 : 13, family: "system-ui, sans-serif" },
      margin: { l: isNarrow ? 52 : 66, r: 12, t: 10, b: 46 },
      hoverlabel: { bgcolor: tint("--panel"), bordercolor: tint("--line"),
        font: { color: tint("--ink") } },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: tint("--quiet"), activecolor: tint("--accent") },
      // On a narrow screen a finger on a figure scrolls the page.
      dragmode: isNarrow ? false : "zoom",
      ...extra,
    };
    layout.legend = { orientation: "h", x: 0, y: 1.01, yanchor: "bottom", ...extra.legend };
    for (const name of Object.keys(layout)) {
      if (/^[xy]axis\d*$/.test(name)) layout[name] = { ...axisStyle(), ...layout[name] };
    }
    for (const name of ["xaxis", "yaxis"]) {
      layout[name] = { ...axisStyle(), ...layout[name] };
      // Else plotly names 20 and 200 alike: 2.
      if (layout[name].type === "log") layout[name].tickformat = "~g";
    }
    return layout;
  }

  const config = () => ({ responsive: true, displaylogo: false,
    displayModeBar: window.innerWidth >= 700 ? "hover" : false,
    modeBarButtons: [["zoom2d", "pan2d", "resetScale2d", "toImage"]] });

  // ---- figures along the course -----------------------------------------------------------

  const UNITS = [["seconds", 3600, 0.05], ["minutes", 60, 3], ["hours", 1, 96],
    ["days", 1 / 24, Infinity]];

  function timeUnit() {
    let most = 0;
    for (const figure of page.figures) {
      for (const trace of figure.data) {
        const hours = trace.meta.x && trace.meta.x.hours;
        if (hours && hours.length) most = Math.max(most, hours[hours.length - 1] || 0);
      }
    }
    return UNITS.find((unit) => most < unit[2]);
  }

  function positions(meta, unit) {
    if (chosen.axis === "hours") {
      return meta.x.hours.map((h) => (h === null ? null : h * unit[1]));
    }
    if (chosen.axis === "tokens") {
      return meta.x.samples.map((n) => (n === null || !meta.tokens ? null : n * meta.tokens));
    }
    return meta.x[chosen.axis];
  }

  function dressed(trace, unit) {
    const color = palette(trace.meta.color);
    const full = { ...trace, name: plain(trace.name) };
    if (trace.legendgroup) full.legendgroup = plain(trace.legendgroup);
    if (trace.meta.x) full.x = positions(trace.meta, unit);
    for (const key of ["text", "customdata", "y", "x"]) {
      if (Array.isArray(full[key])) full[key] = plainAll(full[key]);
    }
    if (trace.meta.band) {
      full.fillcolor = color + "33";
      full.line = { ...trace.line, color };
    } else if (trace.type === "bar") {
      full.marker = { color };
    } else {
      full.line = { ...trace.line, color };
      full.marker = { ...trace.marker, color };
    }
    return full;
  }

  function plotPlace(figure) {
    const place = byId(`f-${figure.id}`);
    if (!place.firstChild) {
      place.append(make("h3", figure.title, { id: `h-${figure.id}` }),
        make("div", null, { class: "plot", id: `p-${figure.id}`, role: "img",
          "aria-labelledby": `h-${figure.id} c-${figure.id}` }),
        make("figcaption", figure.caption, { id: `c-${figure.id}` }));
    }
    return byId(`p-${figure.id}`);
  }

  function drawFigure(figure) {
    const isEmpty = !figure.data.some((trace) => trace.y && trace.y.length);
    byId(`f-${figure.id}`).hidden = isEmpty;
    if (isEmpty) return;
    const place = plotPlace(figure);
    const unit = timeUnit();
    const layout = layoutOf(figure.layout, figure.height);
    if (figure.axis) {
      const titles = { steps: "steps", hours: `${unit[0]} since the start`, samples: "samples",
        tokens: "tokens" };
      layout.xaxis = { ...layout.xaxis, title: { text: titles[chosen.axis] },
        uirevision: chosen.axis };
    }
    Plotly.react(place, figure.data.map((trace) => dressed(trace, unit)), layout, config());
  }

  // ---- the landscape ----------------------------------------------------------------------

  const lands = () => page.landscapes[chosen.run] || { items: [], path: [] };
  function shownItems() {
    const all = lands().items;
    return byId("landscape-only").checked ? all.filter((item) => item.kind !== "stay") : all;
  }
  function currentItem() {
    const items = shownItems();
    const found = items.find((item) => item.iteration === chosen.decision);
    // Until somebody has chosen: the last change tells more than the last decision to stay.
    const changes = items.filter((item) => item.kind !== "stay");
    return found || changes[changes.length - 1] || items[items.length - 1] || null;
  }

  function fillLandscape() {
    const total = page.landscapes.reduce((sum, one) => sum + one.items.length, 0);
    byId("no-landscape").hidden = total > 0;
    byId("landscape-body").hidden = total === 0;
    if (total === 0) return;
    if (!lands().items.length) {
      chosen.run = page.landscapes.findIndex((one) => one.items.length);
    }
    byId("landscape-run-label").hidden = page.runs.length < 2;
    byId("landscape-run").replaceChildren(...page.runs.map((run, i) => {
      const option = make("option", run.name, { value: i });
      option.disabled = !page.landscapes[i].items.length;
      option.selected = i === chosen.run;
      return option;
    }));
    const items = shownItems();
    const now = currentItem();
    byId("landscape-pick").replaceChildren(...items.map((item) => {
      const what = item.kind === "stay" ? "stay" : item.obeyed ? "change" : "would change";
      const option = make("option", `${item.number}: step ${item.iteration}, ${what}`,
        { value: item.iteration });
      option.selected = item === now;
      return option;
    }));
    const at = items.indexOf(now);
    byId("landscape-back").disabled = at <= 0;
    byId("landscape-next").disabled = at < 0 || at >= items.length - 1;
    if (now) drawLandscape(now);
  }

  function pick(iteration) {
    chosen.decision = iteration;
    fillLandscape();
  }

  function heatMap(item) {
    const isNarrow = window.innerWidth < 700;
    const flat = item.gains.flat().length;
    const z = item.by_goodput
      ? item.gains.map((line) => line.map((g) => (g === null || g <= -1 ? null : Math.log2(1 + g))))
      : item.speeds;
    const known = z.flat().filter((v) => v !== null);
    const words = item.gains.map((line, i) => line.map((gain, j) => (gain === null ? "" :
      item.by_goodput ? percent(gain, 0) : few(item.speeds[i][j]))));
    const hover = item.gains.map((line, i) => line.map((gain, j) => (gain === null ? "" :
      `${item.layouts[i]}, batch ${item.batches[j]} in ${item.micros[i][j]}\n` +
      (item.by_goodput ? `goodput ${percent(gain)}\n` : "") +
      `${few(item.speeds[i][j])} samples/s, ${item.sources[i][j]}`)));
    const most = Math.min(Math.max(...known.map(Math.abs), 0.25), 2.5);
    const scale = [[0, isDark() ? "#b4532a" : "#d9774a"], [0.5, tint("--mid")],
      [1, isDark() ? "#3f8ae0" : "#4a94dd"]];
    const shares = [-0.75, -0.5, -0.25, 0, 0.5, 1, 3];
    return {
      type: "heatmap", x: item.batches.map((_, i) => i), y: item.layouts.map((_, i) => i), z,
      text: plainAll(words), hovertext: plainAll(hover), hovertemplate: "%{hovertext}<extra></extra>",
      texttemplate: flat <= (isNarrow ? 30 : 130) ? "%{text}" : "", xgap: 2, ygap: 2, name: "",
      colorscale: item.by_goodput ? scale : "Viridis", hoverongaps: false, showlegend: false,
      ...(item.by_goodput ? { zmin: -most, zmax: most } : {}),
      showscale: !isNarrow,
      colorbar: item.by_goodput ? {
        title: { text: "goodput" }, tickvals: shares.map((g) => Math.log2(1 + g)),
        ticktext: shares.map((g) => (g === 0 ? "as now" : percent(g, 0))),
        outlinewidth: 0,
      } : { title: { text: "samples/s" }, outlinewidth: 0 },
    };
  }

  function drawLandscape(item) {
    const hasCells = item.layouts.length > 0;
    const place = byId("p-landscape");
    place.hidden = !hasCells;
    if (hasCells) {
      // In the upper right of a cell, so that what it says stays readable. What is no longer among
      // the rows or columns has no place.
      const spot = (layout, batch) => [item.batches.indexOf(batch) + 0.3,
        item.layouts.indexOf(layout) + 0.28];
      const isThere = (p) => p[0] > 0 && p[1] > 0;
      const way = lands().path.filter((p) => p[0] < item.iteration);
      const points = way.map((p) => spot(p[1], p[2]));
      const now = spot(item.now[0], item.now[1]);
      if (!points.length || points[points.length - 1].join() !== now.join()) points.push(now);
      const goal = spot(item.to[0], item.to[1]);
      const goes = item.kind !== "stay";
      if (goes && item.obeyed) points.push(goal);
      const walked = points.filter(isThere);
      const ink = tint("--ink");
      const mark = (p, name, symbol, size) => ({
        type: "scatter", mode: "markers", name, x: [p[0]], y: [p[1]], hoverinfo: "skip",
        marker: { symbol, size, color: ink, line: { width: 2, color: ink } }, visible: isThere(p),
      });
      const data = [heatMap(item),
        { type: "scatter", mode: "lines+markers", name: "way so far", hoverinfo: "skip",
          x: walked.map((p) => p[0]), y: walked.map((p) => p[1]),
          line: { color: ink, width: 2, dash: "dot" }, marker: { size: 5, color: ink } },
        mark(now, "then", "circle-open", 13)];
      if (goes) data.push(mark(goal, item.obeyed ? "taken" : "would be taken", "star", 12));
      const ticks = (names) => ({ tickmode: "array", tickvals: names.map((_, i) => i),
        ticktext: plainAll(names), showgrid: false, range: [-0.5, names.length - 0.5] });
      Plotly.react(place, data, layoutOf({
        xaxis: { ...ticks(item.batches.map(String)), title: { text: "batch, samples" } },
        yaxis: { ...ticks(item.layouts), automargin: true },
        uirevision: `${chosen.run} ${item.iteration}`,
      }, 170 + 44 * item.layouts.length), config());
    }
    const left = item.left_out > 0 ? ` ${item.left_out} more layouts were worth less.` : "";
    byId("c-landscape").textContent = !hasCells ? "" : (item.by_goodput
      ? "Goodput of each layout and batch over that of the configuration then (ring), each with its "
        + "best micro-batch."
      : "Samples per second of each layout and batch: this decision did not weigh batches by goodput.")
      + " Dotted: the way of the run so far." + left;
    const list = make("ul");
    for (const line of item.words) list.append(make("li", line));
    byId("landscape-words").replaceChildren(make("h3", `Decision ${item.number}`), list);
    const heads = ["layout", "batch", "micro-batch", "samples/s", "goodput", "needed", "verdict"];
    byId("t-candidates").hidden = !item.candidates.length;
    table(byId("t-candidates"), "The best moves as the decision saw them", heads,
      item.candidates.map((c) => [c[0], c[1], c[2], few(c[3]), percent(c[4]), share(c[5]), c[6]]),
      { numbers: [1, 2, 3, 4, 5] });
  }

  // ---- tables -----------------------------------------------------------------------------

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
      page.changes.map(columns), { numbers: [0, 2, 3, 4, 5, 6, 7, 8, 9].map((i) => i + shift) });
    byId("compare").hidden = isAlone;
    byId("to-compare").hidden = isAlone;
    byId("common").textContent = page.common === null ? "" :
      `The lowest loss that all of them reached is ${page.common.toFixed(4)}, by the mean of `
      + "50 steps: the common loss of the table.";
    table(byId("t-compare"), "The runs beside each other", page.compared, page.compare);
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
      "goodput expected", "needed", "what came of it"];
    const cells = shown.map((line) => {
      const cellsOf = [...(isAlone ? [] : [page.runs[line[0]].name]), when(line[1]), line[2],
        reasonOf(line), percent(line[7]), share(line[8]), line[9]];
      cellsOf.group = GROUPS[line[4]] || "";
      return cellsOf;
    });
    const shift = isAlone ? 0 : 1;
    table(byId("t-journal"), "What was decided, and what came of it", heads, cells,
      { numbers: [1 + shift, 3 + shift, 4 + shift], mark: (line) => line.group });
  }

  // ---- all of it --------------------------------------------------------------------------

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

  // ---- a page that follows a run ----------------------------------------------------------

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
})();
