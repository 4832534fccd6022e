"use strict";
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const config = { displayModeBar: false, displaylogo: false, responsive: true, showTips: false };
  const plots = Object.keys(figures).map((key) => document.getElementById("plot-" + key));

  // The page's colours, light or dark, on whatever a figure draws besides its data.
  function colours(layout) {
    const css = getComputedStyle(document.documentElement);
    const ink = css.getPropertyValue("--ink").trim();
    const line = css.getPropertyValue("--line").trim();
    const result = { paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", "font.color": ink };
    for (const axis of ["xaxis", "yaxis"]) {
      result[axis + ".gridcolor"] = line;
      result[axis + ".linecolor"] = line;
    }
    (layout.shapes || []).forEach((_, index) => (result["shapes[" + index + "].line.color"] = line));
    return result;
  }

  async function draw(plot) {
    const { data, layout } = figures[plot.id.slice("plot-".length)];
    // A finger scrolls the page and must not be caught by a figure.
    layout.dragmode = matchMedia("(pointer: coarse)").matches ? false : "zoom";
    // On a narrow page the legend needs a row for each name.
    if (plot.clientWidth < 500) layout.height += 16 * data.length;
    try {
      await Plotly.newPlot(plot, data, layout, config);
      await Plotly.relayout(plot, colours(plot.layout));
    } catch (error) {
      plot.parentElement.removeAttribute("role"); // a reader gets the text instead
      plot.removeAttribute("aria-hidden");
      plot.textContent = "This figure could not be drawn; its data is in the table below. " + error;
    }
  }

  function zoom(group) {
    const plot = document.getElementById(group.dataset.plot);
    const view = group.querySelector(".view");
    const select = group.querySelector("select");
    const first = plot.layout.xaxis.range.map(Number);
    const say = () => {
      const [from, to] = plot.layout.xaxis.range.map(Number);
      view.textContent = "In view: " + from.toFixed(1) + " s to " + to.toFixed(1) + " s; drawn to " + group.dataset.end + " s";
    };
    const show = (from, to) => Plotly.relayout(plot, { "xaxis.range": [from, to] });
    const moves = {
      earlier: (from, to) => [from - (to - from) / 2, to - (to - from) / 2],
      later: (from, to) => [from + (to - from) / 2, to + (to - from) / 2],
      closer: (from, to) => [from + (to - from) / 4, to - (to - from) / 4],
      wider: (from, to) => [from - (to - from) / 2, to + (to - from) / 2],
    };
    select.addEventListener("change", () => show(...(select.value ? select.value.split(" ").map(Number) : first)));
    for (const button of group.querySelectorAll("button"))
      button.addEventListener("click", () => show(...moves[button.dataset.do](...plot.layout.xaxis.range.map(Number))));
    plot.on("plotly_relayout", say);
    say();
  }

  Promise.all(plots.map(draw)).then(() => {
    for (const group of document.querySelectorAll(".zoom")) {
      group.hidden = !document.getElementById(group.dataset.plot).querySelector(".main-svg");
      if (!group.hidden) zoom(group);
    }
    // Where plotly measures texts; nothing for a screen reader.
    document.getElementById("js-plotly-tester")?.setAttribute("aria-hidden", "true");
    document.documentElement.dataset.drawn = plots.filter((plot) => plot.querySelector(".main-svg")).length;
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () =>
    plots.forEach((plot) => Plotly.relayout(plot, colours(plot.layout)))
  );
})();
