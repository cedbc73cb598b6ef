// Two runs side by side: what became slower or faster, and what differs between them.
"use strict";

const UNITS = { s: seconds, bytes, "1/s": number, "bytes/s": rate, share, "": number };
const inUnit = (row, value) => (UNITS[row.unit ?? "s"] || ((v) => `${number(v)} ${row.unit}`))(value);
const signed = (row, value) => (known(value) ? `${value > 0 ? "+" : value < 0 ? "−" : ""}${inUnit(row, Math.abs(value))}` : "–");

function changes(host, title, rows) {
  // Rows of different units are compared by how many times as much.
  const size = new Set(rows.map((r) => r.unit)).size > 1 ? (r) => (known(r.ratio) ? r.ratio - 1 : 0) : (r) => r.change || 0;
  const most = largest(rows.map((r) => Math.abs(size(r)))) || 1;
  add(host, el("h3", {}, title));
  const list = table(host, {
    label: title, limit: 12, empty: "Neither run has any.",
    columns: [
      { key: "name", title: "what", format: word },
      { key: "a", title: "A", numeric: true, cell: (r) => inUnit(r, r.a) }, { key: "b", title: "B", numeric: true, cell: (r) => inUnit(r, r.b) },
      { key: "change", title: "change", numeric: true, cell: (r) => signed(r, r.change) },
      { key: "ratio", title: "B / A", numeric: true, format: ratio },
      { key: "bar", title: "less · more", value: (r) => Math.abs(size(r)), cell: (r) => diverging(size(r), most) },
    ],
  });
  list.set(rows);
}

// A bar from the middle: to the left is less, to the right more.
function diverging(change, most) {
  const width = (50 * Math.abs(change)) / most;
  return el("div", { class: "diverging", "aria-hidden": "true" }, el("span", { class: change < 0 ? "less" : "more", style: { left: `${change < 0 ? 50 - width : 50}%`, width: `${width}%` } }));
}

// Findings that one of the two does not have: the cause of a difference is among them, if any is known.
function only(host, data) {
  const rows = [["A", data.a, data.only_a], ["B", data.b, data.only_b]].flatMap(([name, of, found]) =>
    (found || []).map((f) => el("li", { "data-id": f.id }, el("b", {}, `Only in ${name}, ${of.title}: `), kept(f.title))));
  if (rows.length) add(host, el("ul", { class: "only" }, rows));
}

function side(name, data, open) {
  return el("article", { class: "side" }, el("h2", {}, `${name}: ${data.title}`),
    facts([["ranks", count(data.ranks)], ["a step takes", seconds(data.step_s)], ["samples per second", number(data.samples_per_s)]]),
    el("p", {}, kept(data.verdict)), button(`Open the report of ${name}`, open, { class: "open" }));
}

function comparison(host, data, open) {
  const top = el("div", { class: "top" }, verdict(data.verdict));
  const sides = el("div", { class: "pair sides" }, side("A", data.a, () => open(0)), side("B", data.b, () => open(1)));
  const changed = el("section", { id: "s-changes", "aria-label": "What changed" }, el("header", { class: "head" }, el("h2", {}, "What changed")));
  const body = el("div", { class: "body pair" });
  const [left, right] = [el("div", {}), el("div", {})];
  changes(left, "Figures", data.figures);
  changes(left, "Work by phase, per step", data.phases);
  changes(right, "Exposed communication, per step", data.tags);
  changes(right, "Operations, per step and rank", data.operations);
  only(changed, data);
  add(changed, add(body, [left, right]));
  const steps = el("section", { id: "s-steps", "aria-label": "Steps of both runs" }, el("header", { class: "head" }, el("h2", {}, "Steps of both runs")));
  const pair = el("div", { class: "body pair" });
  add(host, [top, sides, changed, add(steps, pair)]);
  data.documents.forEach((d, i) => {
    const place = el("div", {}, el("h3", {}, `${"AB"[i]}: ${d.run.title}`));
    pair.append(place);
    const t = d.timeline, n = t.first_step.length;
    chart(place, { label: `Steps of ${"AB"[i]}`, height: 220 }).set({
      x: t.first_step, end: n ? t.first_step[n - 1] + t.steps[n - 1] : undefined, series: levels(everybody(d), true, "phases", t), marks: stepMarks(d),
    });
  });
  const differ = el("section", { id: "s-differences", "aria-label": "What differs" }, el("header", { class: "head" }, el("h2", {}, "What differs between them")));
  const inner = el("div", { class: "body" });
  add(host, add(differ, inner));
  add(inner, el("div", { class: "controls" }, filterBox("Filter differences", (words) => list.filter(words))));
  const list = table(inner, {
    label: "Values that differ", limit: 30, empty: "Nothing that was recorded differs.",
    columns: [
      { key: "section", title: "where", format: word }, { key: "key", title: "name", format: word, code: true },
      { key: "a", title: "A", cell: (r) => word(shown(r.a)), code: true, value: (r) => shown(r.a) }, { key: "origin_a", title: "origin", format: word },
      { key: "b", title: "B", cell: (r) => word(shown(r.b)), code: true, value: (r) => shown(r.b) }, { key: "origin_b", title: "origin", format: word },
    ],
  });
  list.set(data.differences);
}
