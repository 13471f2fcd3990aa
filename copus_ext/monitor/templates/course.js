// Figures along the course of training.

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

// What Plotly still draws: it ends later than the call that asks for it.
const drawing = new Set();
function untilDrawn(drawn) {
  drawing.add(drawn);
  drawn.finally(() => drawing.delete(drawn));
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
  layout.annotations = (layout.annotations || []).map(
    (note) => ({ ...note, text: plain(note.text) }));
  untilDrawn(
    Plotly.react(place, figure.data.map((trace) => dressed(trace, unit)), layout, config()));
}
