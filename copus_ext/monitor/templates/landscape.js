// The Goodput landscape of a decision.

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
    const what = item.kind === "stay" ? "stay" : item.applied ? "change" : "would change";
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
    (item.by_goodput ? `predicted goodput ${percent(gain)} +- ${share(item.doubts[i][j])}\n` : "") +
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
    if (goes && item.applied) points.push(goal);
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
    if (goes) data.push(mark(goal, item.applied ? "taken" : "would be taken", "star", 12));
    const ticks = (names) => ({ tickmode: "array", tickvals: names.map((_, i) => i),
      ticktext: plainAll(names), showgrid: false, range: [-0.5, names.length - 0.5] });
    untilDrawn(Plotly.react(place, data, layoutOf({
      xaxis: { ...ticks(item.batches.map(String)), title: { text: "batch, samples" } },
      yaxis: { ...ticks(item.layouts), automargin: true },
      uirevision: `${chosen.run} ${item.iteration}`,
    }, 170 + 44 * item.layouts.length), config()));
  }
  const left = item.left_out > 0 ? ` ${item.left_out} more layouts were worth less.` : "";
  byId("c-landscape").textContent = !hasCells ? "" : (item.by_goodput
    ? "Predicted goodput of each layout and batch over that of the configuration then (ring), each "
      + "with its best micro-batch. A measured outcome stands in the table of changes."
    : "Samples per second of each layout and batch: this decision did not weigh batches by goodput.")
    + " Dotted: the way of the run so far." + left;
  const list = make("ul");
  for (const line of item.words) list.append(make("li", line));
  byId("landscape-words").replaceChildren(make("h3", `Decision ${item.number}`), list);
  const heads = ["layout", "batch", "micro-batch", "samples/s", "predicted goodput", "needed", "blocked by"];
  byId("t-candidates").hidden = !item.candidates.length;
  table(byId("t-candidates"), "The best moves as the decision saw them", heads,
    item.candidates.map((c) => [c[0], c[1], c[2], few(c[3]), c[4], share(c[5]), c[6]]),
    { numbers: [1, 2, 3, 4, 5] });
}
