// Cells on a canvas: ranks by steps, or ranks by ranks. Mouse, touch and arrow keys choose one.
"use strict";

// From blue over the page's colour to orange-red: told apart by all, and by lightness as well.
const EARLY = [[0, 114, 178], [86, 180, 233]], LATE = [[230, 159, 0], [213, 94, 0]];
const mix = (a, b, t) => a.map((v, i) => v + (b[i] - v) * t);

function parse(colour) {
  const hex = colour.replace("#", "");
  return [0, 2, 4].map((i) => parseInt(hex.slice(i, i + 2), 16));
}

// t from -1 to 1; 0 is the page.
function tint(t, paper) {
  const [near, far] = t < 0 ? [EARLY[1], EARLY[0]] : LATE;
  const size = Math.min(1, Math.abs(t));
  return size < 0.5 ? mix(paper, near, size * 2) : mix(near, far, size * 2 - 1);
}

// rows: [{name, values}], columns: how they are called; `pick(row, column)` on click and Enter.
function heatMap(host, { label, pick, describe, rowTitle = "rank", square = false }) {
  const state = { rows: [], columns: [], scale: 1, at: [0, 0], scheme: 0 };
  const canvas = el("canvas", { tabindex: "0", role: "application", "aria-roledescription": "heat map", "aria-label": `${label}. Arrow keys move, Enter chooses the ${rowTitle}.` });
  const mark = el("div", { class: "cellmark", "aria-hidden": "true" });
  const names = el("div", { class: "names", "aria-hidden": "true" });
  const below = el("div", { class: "below", "aria-hidden": "true" });
  const said = el("p", { class: "said", role: "status", "aria-live": "polite" });
  const key = el("div", { class: "scale", "aria-hidden": "true" });
  const node = el("div", { class: "heat" }, key, el("div", { class: "cells" }, names, el("div", { class: "plane" }, canvas, mark), below), said);
  host.append(node);
  new ResizeObserver(draw).observe(canvas.parentNode);
  darkScheme.addEventListener("change", draw);
  canvas.addEventListener("pointermove", (e) => move(...cell(e)));
  canvas.addEventListener("click", (e) => { move(...cell(e)); choose(); });
  canvas.addEventListener("focus", () => move(...state.at));
  canvas.addEventListener("keydown", (e) => {
    const [r, c] = state.at, far = Math.max(1, Math.round(state.columns.length / 10));
    const to = {
      ArrowUp: [r - 1, c], ArrowDown: [r + 1, c], ArrowLeft: [r, c - 1], ArrowRight: [r, c + 1],
      Home: [r, 0], End: [r, state.columns.length - 1], PageUp: [r, c - far], PageDown: [r, c + far],
    }[e.key];
    if (to) move(...to);
    else if (e.key === "Enter" || e.key === " ") choose();
    else return;
    e.preventDefault();
  });

  function cell(event) {
    const box = canvas.getBoundingClientRect();
    return [Math.floor(((event.clientY - box.top) / box.height) * state.rows.length), Math.floor(((event.clientX - box.left) / box.width) * state.columns.length)];
  }

  function move(r, c) {
    if (!state.rows.length || !state.columns.length) return;
    state.at = [Math.max(0, Math.min(state.rows.length - 1, r)), Math.max(0, Math.min(state.columns.length - 1, c))];
    const [row, column] = state.at, box = [canvas.clientWidth / state.columns.length, canvas.clientHeight / state.rows.length];
    for (const [name, v] of Object.entries({ left: column * box[0], top: row * box[1], width: Math.max(box[0], 3), height: Math.max(box[1], 3) })) mark.style.setProperty(name, `${v}px`);
    mark.hidden = false;
    said.textContent = describe(state.rows[row], state.columns[column], state.rows[row].values[column]);
  }

  function choose() {
    if (state.rows.length) pick(state.rows[state.at[0]], state.columns[state.at[1]]);
  }

  function draw() {
    const [h, w] = [state.rows.length, state.columns.length];
    if (!h || !w) return;
    const each = h <= 4 ? 26 : h <= 16 ? 18 : h <= 64 ? 8 : h <= 128 ? 4 : 2;
    canvas.style.setProperty("height", `${each * h}px`);
    const wide = Math.max(canvas.parentNode.parentNode.clientWidth - names.clientWidth, 0);
    canvas.parentNode.style.setProperty("max-width", square ? `${Math.min(wide, w * each * 2.5)}px` : "none");
    below.style.setProperty("max-width", canvas.parentNode.style.maxWidth);
    canvas.width = w;
    canvas.height = h;
    const paper = parse(ink("--cell")), none = parse(ink("--none"));
    const image = new ImageData(w, h);
    state.rows.forEach((row, r) => row.values.forEach((v, c) => {
      const colour = known(v) ? tint(v / state.scale, paper) : none;
      image.data.set([...colour, 255], (r * w + c) * 4);
    }));
    canvas.getContext("2d").putImageData(image, 0, 0);
    label_(each);
  }

  // Names of rows as far as there is room, of those that stand out always.
  function label_(each) {
    const every = Math.max(1, Math.ceil(14 / each));
    const shown = [];
    const wanted = state.rows.map((row, i) => ({ row, i })).filter(({ row, i }) => row.loud || i % every === 0);
    for (const { row, i } of [...wanted.filter((x) => x.row.loud), ...wanted.filter((x) => !x.row.loud)]) {
      if (shown.every((other) => Math.abs(other.i - i) * each >= 13)) shown.push({ row, i });
    }
    put(names, shown.map(({ row, i }) => el("span", { class: row.loud ? "loud" : "", style: { top: `${i * each + each / 2}px` } }, row.loud ? `▶ ${row.name}` : row.name)));
    const n = state.columns.length, ticks = n <= 1 ? [0] : square && n <= 16 ? state.columns.map((_, i) => i) : [...new Set([0, Math.floor(n / 2), n - 1])];
    below.classList.toggle("each", square && n <= 16);
    put(below, ticks.map((i) => el("span", {}, state.columns[i].name)));
  }

  return {
    node, canvas,
    set(rows, columns, scale, words) {
      Object.assign(state, { rows, columns, scale: scale || 1 });
      put(key, el("span", {}, words[0]), el("span", { class: words.length > 2 ? "ramp both" : "ramp" }), el("span", {}, words[words.length - 1]));
      mark.hidden = document.activeElement !== canvas;
      node.dataset.rows = rows.length;
      node.dataset.columns = columns.length;
      draw();
      if (!mark.hidden) move(...state.at);
    },
  };
}
