// Draws every figure from the JSON beside it, and reports on the page how many were drawn.
"use strict";
const options = {
  responsive: true,
  displaylogo: false,
  modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"],
  toImageButtonOptions: { format: "svg" },
};
const drawn = [...document.querySelectorAll("figure")].map((figure) => {
  const { data, layout } = JSON.parse(figure.querySelector("script").textContent);
  return Plotly.newPlot(figure.querySelector(".plot"), data, layout, options);
});
Promise.all(drawn).then((plots) => {
  document.body.dataset.drawn = plots.length;
});
