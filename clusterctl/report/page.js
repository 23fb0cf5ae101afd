"use strict";
// Show the values under the pointer, and hide a series on a click in the legend.
for (const figure of document.querySelectorAll("figure[data-x0]")) {
  const svg = figure.querySelector("svg"), tip = figure.querySelector(".tip"), cursor = figure.querySelector(".cursor");
  const at = Object.fromEntries(["x0", "x1", "y0", "y1", "left", "right", "top", "bottom"].map((key) => [key, Number(figure.dataset[key])]));
  const log = figure.dataset.log === "1";
  const lines = [...svg.querySelectorAll("polyline.series")].map((line) => ({
    line, name: line.dataset.name, points: line.getAttribute("points").split(" ").map((pair) => pair.split(",").map(Number)) }));
  const value = (y) => {
    const share = (at.bottom - y) / (at.bottom - at.top);
    return log ? Math.exp(Math.log(at.y0) + share * (Math.log(at.y1) - Math.log(at.y0))) : at.y0 + share * (at.y1 - at.y0);
  };
  const text = (number) => Math.abs(number) >= 1e5 || (number && Math.abs(number) < 1e-3) ? number.toExponential(3) : String(Number(number.toPrecision(4)));
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect(), x = (event.clientX - box.left) * svg.viewBox.baseVal.width / box.width;
    if (x < at.left || x > at.right) return;
    const found = new Map();
    for (const { line, name, points } of lines) {
      if (line.classList.contains("off")) continue;
      let low = 0, high = points.length - 1;
      while (low < high) { const middle = (low + high) >> 1; if (points[middle][0] < x) low = middle + 1; else high = middle; }
      const near = low && x - points[low - 1][0] < points[low][0] - x ? points[low - 1] : points[low];
      if (near && Math.abs(near[0] - x) < 30) found.set(name, near);
    }
    const step = Math.round(at.x0 + (x - at.left) / (at.right - at.left) * (at.x1 - at.x0));
    tip.textContent = [figure.dataset.x + " " + step, ...[...found].map(([name, point]) => name + " " + text(value(point[1])))].join("   ");
    cursor.setAttribute("x1", x); cursor.setAttribute("x2", x); cursor.classList.remove("off");
  });
  svg.addEventListener("pointerleave", () => { tip.textContent = ""; cursor.classList.add("off"); });
  for (const button of figure.querySelectorAll(".legend button")) button.addEventListener("click", () => {
    const hidden = button.classList.toggle("hidden");
    button.setAttribute("aria-pressed", String(!hidden));
    for (const line of svg.querySelectorAll("[data-name]")) if (line.dataset.name === button.dataset.series) line.classList.toggle("off", hidden);
  });
}
// Print what is folded, but not the earlier rows of long tables.
addEventListener("beforeprint", () => { for (const part of document.querySelectorAll("details:not(.earlier)")) part.open = true; });
