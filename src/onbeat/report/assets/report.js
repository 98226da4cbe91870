"use strict";
(async function () {
  function unpacked(id) {
    const packed = Uint8Array.from(atob(document.getElementById(id).textContent), (c) => c.charCodeAt(0));
    return new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip")));
  }

  const library = document.createElement("script");
  library.textContent = await unpacked("plotly").text();
  const figures = await unpacked("figures").json();
  document.head.append(library);

  const dark = window.matchMedia("(prefers-color-scheme: dark)");

  function colour(name) {
    return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  }

  function themed(layout) {
    const ink = colour("--ink"), line = colour("--line"), muted = colour("--muted");
    const full = structuredClone(layout);
    const axis = { gridcolor: line, zerolinecolor: line, linecolor: line, tickcolor: line, automargin: true };
    for (const name of Object.keys(full)) {
      if (!/^[xy]axis/.test(name)) continue;
      full[name] = Object.assign({}, axis, full[name]);
      full[name].title = Object.assign({ font: { size: 12, color: muted }, standoff: 10 }, full[name].title);
    }
    return Object.assign(full, {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: "system-ui, sans-serif", size: 12, color: ink },
      margin: { l: 56, r: 24, t: full.showlegend ? 40 : 14, b: 48 },
      legend: { orientation: "h", y: 1.0, yanchor: "bottom", x: 0, font: { size: 11 }, itemsizing: "constant" },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: muted, activecolor: ink },
      hovermode: "closest",
    });
  }

  function draw(node) {
    const figure = structuredClone(figures[node.dataset.figure]);
    Plotly.react(node, figure.data, themed(figure.layout), {
      displaylogo: false, responsive: true, displayModeBar: false,
    });
    node.dataset.drawn = "yes";
  }

  function drawVisible() {
    for (const node of document.querySelectorAll("[data-figure]")) {
      const holder = node.closest("details");
      if (!holder || holder.open) draw(node);
    }
  }

  for (const holder of document.querySelectorAll("details")) {
    holder.addEventListener("toggle", () => {
      if (!holder.open) return;
      for (const node of holder.querySelectorAll("[data-figure]:not([data-drawn])")) draw(node);
    });
  }

  // On paper everything is open, light and as wide as a sheet.
  let closed = [];
  window.addEventListener("beforeprint", () => {
    closed = [...document.querySelectorAll("details:not([open])")];
    for (const holder of closed) holder.open = true;
    document.documentElement.classList.add("printed");
    drawVisible();
  });
  window.addEventListener("afterprint", () => {
    document.documentElement.classList.remove("printed");
    for (const holder of closed) holder.open = false;
    drawVisible();
  });
  dark.addEventListener("change", drawVisible);
  drawVisible();
})();
