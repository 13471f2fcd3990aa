// Colours, and how every figure looks.

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
