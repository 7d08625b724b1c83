// Draws every figure from the JSON beside it, in the colours of the page, and reports on the page how
// many were drawn; entries of legends hide traces, and headings of tables sort rows.
"use strict";
const options = {
  responsive: true,
  displaylogo: false,
  modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"],
  toImageButtonOptions: { format: "svg" },
};

// What of a layout depends on whether the page is light or dark.
function colours() {
  const style = getComputedStyle(document.documentElement);
  const of = (name) => style.getPropertyValue(name).trim();
  const found = {
    "font.color": of("--ink"), paper_bgcolor: of("--page"), plot_bgcolor: of("--page"),
    "hoverlabel.bgcolor": of("--page"), "hoverlabel.font.color": of("--ink"),
  };
  for (const axis of ["xaxis", "yaxis"]) {
    found[`${axis}.gridcolor`] = of("--grid");
    found[`${axis}.linecolor`] = found[`${axis}.tickcolor`] = of("--axis");
  }
  return found;
}

const drawn = [...document.querySelectorAll("figure")].map((figure) => {
  const { data, layout } = JSON.parse(figure.querySelector("script").textContent);
  const plot = figure.querySelector(".plot");
  return Plotly.newPlot(plot, data, layout, options).then(() => Plotly.relayout(plot, colours()));
});
Promise.all(drawn).then((plots) => {
  document.body.dataset.drawn = plots.length;
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const plot of document.querySelectorAll(".plot")) Plotly.relayout(plot, colours());
});

for (const button of document.querySelectorAll(".legend button")) {
  button.addEventListener("click", () => {
    const visible = button.getAttribute("aria-pressed") === "false";
    button.setAttribute("aria-pressed", visible);
    for (const plot of button.closest("section").querySelectorAll(".plot")) {
      const indices = plot.data.flatMap((trace, i) => (trace.name === button.dataset.name ? [i] : []));
      if (indices.length) Plotly.restyle(plot, { visible }, indices);
    }
  });
}

// The number that a cell begins with, in base units; durations may have several parts.
const UNITS = { h: 3600, min: 60, ms: 1e-3, "\u00b5s": 1e-6, kB: 1e3, MB: 1e6, GB: 1e9 };
function number(text) {
  const [begin] = text.split(/[(x]| of | on | to /);
  const parts = [...begin.matchAll(/(-?\d[\d,]*\.?\d*(?:e[-+]?\d+)?)\s*([a-zA-Z\u00b5]*)/g)];
  if (!parts.length || parts[0].index > 0) return null;
  return parts.reduce((sum, [, n, unit]) => sum + Number(n.replaceAll(",", "")) * (UNITS[unit] ?? 1), 0);
}
function compare(a, b) {
  const [first, second] = [number(a), number(b)];
  if (first === null && second === null) return a.localeCompare(b);
  if (first === null || second === null) return first === null ? 1 : -1;
  return first - second;
}
for (const table of document.querySelectorAll(".sortable")) {
  const headings = [...table.tHead.rows[0].cells];
  headings.forEach((heading, i) => {
    heading.tabIndex = 0;
    const sort = () => {
      const upwards = heading.getAttribute("aria-sort") !== "ascending";
      for (const other of headings) other.removeAttribute("aria-sort");
      heading.setAttribute("aria-sort", upwards ? "ascending" : "descending");
      const rows = [...table.tBodies[0].rows];
      const text = (row) => row.cells[i].textContent.trim();
      rows.sort((a, b) => (upwards ? 1 : -1) * compare(text(a), text(b)));
      table.tBodies[0].append(...rows);
    };
    heading.addEventListener("click", sort);
    heading.addEventListener("keydown", (event) => { if (event.key === "Enter") sort(); });
  });
}
