// What all other parts use: the data, what its reader has chosen, words, tables.

const byId = (id) => document.getElementById(id);
const page = JSON.parse(byId("data").textContent);
const chosen = { axis: "steps", run: 0, decision: null, journalPage: 0 };
let isPrinting = false;
let rowsPerPage = 100;

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
