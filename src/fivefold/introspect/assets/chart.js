// Lines, points, bars and stacked steps over a shared axis, drawn by uPlot.
"use strict";

const charts = new Set();
darkScheme.addEventListener("change", () => charts.forEach((c) => c.rebuild()));

// A pattern of lines, so that exposed communication is not told by colour alone.
function hatch(ctx, colour) {
  const tile = document.createElement("canvas");
  const n = Math.round(6 * devicePixelRatio);
  tile.width = tile.height = n;
  const c = tile.getContext("2d");
  c.globalAlpha = 0.28;
  c.fillStyle = colour;
  c.fillRect(0, 0, n, n);
  c.globalAlpha = 1;
  c.strokeStyle = colour;
  c.lineWidth = n / 4;
  for (const shift of [-n, 0, n]) {
    c.beginPath();
    c.moveTo(shift, n);
    c.lineTo(shift + n, 0);
    c.stroke();
  }
  return ctx.createPattern(tile, "repeat");
}

// One unit for all marks of an axis.
function axisOf(units) {
  return (u, splits) => {
    const most = largest(splits.map(Math.abs));
    let unit = units[0];
    for (const candidate of units) if (most >= candidate[0] * 0.9995) unit = candidate;
    return splits.map((x) => (x === null ? "" : x === 0 ? "0" : `${+(x / unit[0]).toPrecision(4)} ${unit[1]}`));
  };
}
const each = (format) => (u, splits) => splits.map((x) => (x === null ? "" : format(x)));
// On axes of powers of ten every mark has its own unit.
const LOGS = { seconds: each((x) => +seconds(x).split(" ")[0] + " " + seconds(x).split(" ")[1]), rate: each((x) => +rate(x).split(" ")[0] + " " + rate(x).split(" ")[1]) };
const TENS = (u, splits) => splits.map((v) => (v > 0 && Math.abs(Math.log10(v) - Math.round(Math.log10(v))) < 1e-6 ? v : null));
const POWERS = Array.from({ length: 56 }, (_, i) => 2 ** i);
const AXES = {
  seconds: axisOf(SECONDS), bytes: axisOf(BYTES), rate: axisOf(RATES),
  count: each((x) => x.toLocaleString("en", { maximumFractionDigits: 2, notation: Math.abs(x) >= 1e5 ? "compact" : "standard" })),
  number: each((x) => String(+x.toPrecision(4))), share: each((x) => `${+(x * 100).toPrecision(3)} %`),
  bucket: each((x) => (Number.isInteger(x) ? power(x) : "")), duration: each((x) => duration(x).replace(".00", "")),
};
const FORMATS = { seconds, bytes, rate, count, number, share, bucket: power, duration };

// x, y: names of FORMATS. series: {name, values, colour, kind: "stack"|"line"|"points"|"bars", hatched, dash}.
function chart(host, { label, height = 200, x = "count", xName = "step", y = "seconds", log = false, zoom = true, linked, summary = "mean" }) {
  const state = { data: null, told: "", zoomed: null, marks: [], steady: null, plot: null };
  const canvas = el("div", { class: "canvas" });
  const legend = el("ul", { class: "legend" });
  const where = el("span", { class: "where" });
  const tools = el("div", { class: "tools" }, where, zoom && [
    button("−", () => step(2), { "aria-label": `${label}: zoom out`, title: "zoom out" }),
    button("+", () => step(0.5), { "aria-label": `${label}: zoom in`, title: "zoom in" }),
    button("reset", () => reset(), { class: "reset", "aria-label": `${label}: reset zoom`, disabled: true })]);
  const node = el("figure", { class: "chart", tabindex: "0", role: "group", "aria-label": `${label}. Left and right arrows move, plus and minus zoom, escape resets.`, on: { keydown: key } }, canvas, tools, legend);
  const resetButton = tools.querySelector(".reset");
  host.append(node);
  new ResizeObserver(() => {
    if (state.plot && canvas.clientWidth) state.plot.setSize({ width: canvas.clientWidth, height });
  }).observe(canvas);

  function extent() {
    const xs = state.plot.data[0];
    return [xs[0], xs[xs.length - 1]];
  }

  function setZoom(from, to) {
    const [first, last] = extent();
    [from, to] = [Math.max(first, from), Math.min(last, to)];
    if (!(to > from)) return;
    state.plot.setScale("x", { min: from, max: to });
  }

  function step(factor) {
    if (!state.plot) return;
    const { min, max } = state.plot.scales.x;
    const at = state.plot.cursor.idx === null || state.plot.cursor.left < 0 ? (min + max) / 2 : state.plot.data[0][state.plot.cursor.idx];
    const half = ((max - min) * factor) / 2;
    const centre = Math.min(Math.max(at, min), max);
    setZoom(centre - half, centre + half);
  }

  function reset() {
    if (state.plot) state.plot.setScale("x", { min: extent()[0], max: extent()[1] });
  }

  function key(event) {
    const u = state.plot;
    if (!u || event.target !== node) return;
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (move) {
      const { min, max } = u.scales.x, xs = u.data[0];
      let i = known(u.cursor.idx) && u.cursor.left >= 0 ? u.cursor.idx + move : xs.findIndex((v) => v >= min);
      i = Math.max(0, Math.min(xs.length - 1, i));
      if (xs[i] >= min && xs[i] <= max) u.setCursor({ left: u.valToPos(xs[i], "x"), top: 10 });
    } else if (event.key === "+" || event.key === "=") step(0.5);
    else if (event.key === "-") step(2);
    else if (event.key === "Escape" || event.key === "0") reset();
    else return;
    event.preventDefault();
  }

  // What is under the cursor; without one, the mean of what is in sight.
  function tell() {
    const u = state.plot, { x: xs, series } = state.data;
    if (!u || !known(u.scales.x.min)) return;  // uPlot sets scales a moment later
    const i = u.cursor.idx, on = known(i) && u.cursor.left >= 0;
    const { min, max } = u.scales.x;
    const within = xs.map((v) => v >= min && v <= max);
    const told = xs.length ? `${xName} ${FORMATS[x](on ? xs[Math.min(i, xs.length - 1)] : min)}` : "";
    where.textContent = on ? told : xs.length > 1 && summary ? `${summary} of ${xName} ${FORMATS[x](Math.max(min, xs[0]))} to ${FORMATS[x](Math.min(max, xs[xs.length - 1]))}${state.cut ? " · peaks are cut off" : ""}` : "";
    series.forEach((s, n) => {
      const value = on ? s.values[Math.min(i, xs.length - 1)] : summary ? mean(s.values.filter((_, k) => within[k])) : null;
      legend.children[n].lastChild.textContent = on || summary ? FORMATS[s.format || y](value) : "";
    });
  }

  function stacked(series) {
    const levels = series.map(() => null);
    let below = null;
    for (let i = series.length - 1; i >= 0; i--) {
      if (series[i].kind !== "stack") { levels[i] = series[i].values; continue; }
      below = series[i].values.map((v, k) => (v || 0) + (below ? below[k] : 0));
      levels[i] = below;
    }
    return levels;
  }

  // A stack is drawn as steps, which need the end of the last one.
  function columns() {
    const { x: xs, series, end } = state.data;
    const levels = stacked(series);
    if (end === undefined || !xs.length) return [xs, ...levels];
    return [[...xs, end], ...levels.map((v) => [...v, v[v.length - 1]])];
  }

  function line(s) {
    const common = { label: s.name, scale: "y", spanGaps: false, points: { show: false } };
    if (s.kind === "stack") return { ...common, stroke: s.colour, width: 0.5, fill: (u) => (s.hatched ? hatch(u.ctx, s.colour) : s.colour), paths: uPlot.paths.stepped({ align: 1 }) };
    if (s.kind === "bars") return { ...common, stroke: s.colour, fill: (u) => (s.hatched ? hatch(u.ctx, s.colour) : s.colour), width: 0, paths: uPlot.paths.bars({ size: [0.7, 40] }) };
    if (s.kind === "points") return { ...common, stroke: s.colour, width: 0, paths: () => null, points: { show: true, size: 8, fill: s.colour } };
    const few = s.values.filter(known).length < 40;
    return { ...common, stroke: s.colour, width: s.width || 1.6, dash: s.dash, spanGaps: Boolean(s.join), paths: s.steps ? uPlot.paths.stepped({ align: 1 }) : undefined, points: { show: few && !s.steps, size: 5, fill: s.colour } };
  }

  function settings() {
    const axis = { stroke: ink("--soft"), grid: { stroke: ink("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
    const range = (u, min, max) => (min === null ? (log ? [1, 10] : [0, 1]) : log ? uPlot.rangeLog(min, max, 10, true) : min >= 0 ? [0, highest(u, max) * 1.06 || 1] : [min - (max - min) * 0.06, max + (max - min) * 0.06]);
    return {
      width: Math.max(canvas.clientWidth, 100), height, padding: [10, 16, 0, 0], legend: { show: false },
      cursor: { drag: { x: zoom, y: false }, points: { show: false }, y: false, ...(linked ? { sync: { key: linked } } : {}) },
      scales: { x: { time: false, range: (u, min, max) => (x === "bucket" && u.data[0].length ? [u.data[0][0] - 0.6, u.data[0][u.data[0].length - 1] + 0.6] : min === max ? [min, min + 1] : [min, max]) }, y: { range, distr: log ? 3 : 1 } },
      axes: [
        { ...axis, grid: { show: false }, size: 28, space: x === "bucket" ? 56 : 60, values: AXES[x], ...(x === "bucket" || x === "count" ? { incrs: [1, 2, 4, 5, 8, 10, 20, 25, 50, 100, 200, 250, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6] } : {}) },
        { ...axis, size: 58, values: (log && LOGS[y]) || AXES[y], space: 34, ...(y === "bytes" ? { incrs: POWERS } : {}), ...(log ? { filter: TENS, grid: { ...axis.grid, filter: TENS } } : {}) }],
      series: [{}, ...state.data.series.map(line)],
      hooks: { setCursor: [tell], setScale: [scaled_], drawClear: [shade], draw: [pins] },
    };
  }

  function scaled_(u, name) {
    if (name !== "x" || !state.plot) return;
    const [first, last] = extent(), { min, max } = u.scales.x;
    if (!known(min)) return;
    state.zoomed = min > first || max < last ? [min, max] : null;
    if (x === "bucket") state.zoomed = null;
    if (resetButton) resetButton.disabled = !state.zoomed;
    node.dataset.zoomed = state.zoomed ? `${min.toFixed(1)} ${max.toFixed(1)}` : "";
    tell();
  }

  // A few steps far above all others must not flatten the rest: they are cut off, and the chart says so.
  function highest(u, max) {
    const { min: from, max: to } = u.scales.x, xs = u.data[0];
    const tops = xs.map((v, k) => (known(from) && (v < from || v > to) ? null : largest(u.data.slice(1).map((column) => column[k])))).filter((v) => known(v) && v > -Infinity).sort((a, b) => a - b);
    const usual = tops[Math.floor((tops.length - 1) * 0.97)];
    state.cut = tops.length >= 20 && usual > 0 && max > 1.6 * usual;
    return state.cut ? usual * 1.3 : max;
  }

  // Steps outside the steady ones are drawn on grey.
  function shade(u) {
    if (!state.steady) return;
    const [from, to] = state.steady.map((v) => u.valToPos(v, "x", true));
    const { left, top, width, height: tall } = u.bbox;
    u.ctx.save();
    u.ctx.fillStyle = ink("--shade");
    u.ctx.fillRect(left, top, Math.max(0, Math.min(from, left + width) - left), tall);
    if (to < left + width) u.ctx.fillRect(Math.max(to, left), top, left + width - Math.max(to, left), tall);
    u.ctx.restore();
  }

  // What happened, on the axis: a filled mark for saves, a cross and a line for what went wrong.
  function pins(u) {
    const { left, top, width, height: tall } = u.bbox, c = u.ctx, r = 4 * devicePixelRatio;
    c.save();
    for (const mark of state.marks) {
      const at = u.valToPos(mark.x, "x", true);
      if (!(at >= left && at <= left + width)) continue;
      const bad = mark.bad;
      c.strokeStyle = c.fillStyle = bad ? ink("--bad") : ink("--soft");
      c.lineWidth = (bad ? 1.5 : 1) * devicePixelRatio;
      c.setLineDash(bad ? [] : [2 * devicePixelRatio, 3 * devicePixelRatio]);
      c.beginPath();
      c.moveTo(at, top);
      c.lineTo(at, top + tall);
      c.stroke();
      c.setLineDash([]);
      c.beginPath();
      if (bad) { c.moveTo(at - r, top - r); c.lineTo(at + r, top + r); c.moveTo(at + r, top - r); c.lineTo(at - r, top + r); c.stroke(); }
      else { c.moveTo(at, top - r); c.lineTo(at + r, top); c.lineTo(at, top + r); c.lineTo(at - r, top); c.fill(); }
    }
    c.restore();
  }

  function build() {
    if (state.plot) state.plot.destroy();
    state.plot = null;
    put(canvas);
    put(legend, state.data.series.map((s) => el("li", {}, swatch(s.colour, s.hatched, s.kind || "line"), el("span", { class: "name" }, s.name), el("output", { class: "value" }))));
    const keep = state.zoomed;
    state.plot = new uPlot(settings(), columns(), canvas);
    if (keep) setZoom(...keep);
    tell();
  }

  const made = {
    node,
    get plot() { return state.plot; },
    rebuild() { if (state.data && node.isConnected) build(); },
    // data: {x, series, end, marks: [{x, bad}], steady: [from, to]}; keeps the zoom
    set(data) {
      const told = JSON.stringify(data.series.map((s) => [s.name, s.kind, s.colour, s.values.filter(known).length < 40]));
      state.data = data;
      state.marks = data.marks || [];
      state.steady = data.steady || null;
      node.dataset.points = data.x.length;
      if (!state.plot || told !== state.told) build();
      else {
        const keep = state.zoomed;
        state.plot.setData(columns());
        if (keep) setZoom(...keep);
        tell();
      }
      state.told = told;
    },
  };
  charts.add(made);
  return made;
}
