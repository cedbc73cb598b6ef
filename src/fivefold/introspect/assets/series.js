// Figures over time on one axis, with saves and failures marked.
"use strict";

const OVER_TIME = [
  { title: "Throughput", y: "number", unit: "samples per second", lines: [["samples_per_s", "samples per second"]] },
  { title: "Loss", y: "number", loss: true, lines: [] },
  { title: "Memory", y: "bytes", lines: [["rss_bytes", "largest rank"], ["rss_total_bytes", "all ranks"]] },
  { title: "Batches ready", y: "number", lines: [["ready", "least of ranks"]] },
  { title: "Cores in use", y: "number", lines: [["cpu_share", "mean of ranks"]] },
  { title: "Power of processors (watt)", y: "number", energy: true, lines: [["energy_w", "watt, all nodes"]] },
  { title: "Network", y: "rate", lines: [["sent_bytes_per_s", "sent"], ["received_bytes_per_s", "received"]] },
  { title: "GPU memory", y: "bytes", lines: [["gpu_bytes", "largest rank"]] },
  { title: "GPU busy", y: "share", lines: [["gpu_busy", "mean of ranks"]] },
];

// When a step began, between the steps whose time is known.
function timeOf(series, step) {
  const { first_step: firsts, at_s: times } = series;
  let i = firsts.findIndex((first) => first > step);
  if (i < 0) i = firsts.length;
  if (i === 0) return times[0] ?? null;
  if (i === firsts.length) return times[i - 1];
  const part = (step - firsts[i - 1]) / (firsts[i] - firsts[i - 1]);
  return times[i - 1] + part * (times[i] - times[i - 1]);
}

function seriesSection() {
  return new Section({
    id: "series", title: "Over time", needs: ["series", "marks"],
    about: "◆ a save, ✕ a failure or a hang. The cursor is shared.",
    build(body) {
      const grid = el("div", { class: "grid" });
      const note = el("p", { class: "note" });
      add(body, [grid, note]);
      const plots = OVER_TIME.map((about) => {
        const node = el("div", {}, el("h3", {}, about.title));
        grid.append(node);
        return { about, node, plot: chart(node, { label: `${about.title} over time`, height: 150, x: "duration", xName: "time", y: about.y, linked: "time" }) };
      });
      const metrics = new Map();

      function metric(name) {
        if (!metrics.has(name)) {
          const node = el("div", {}, el("h3", {}, name));
          grid.append(node);
          metrics.set(name, chart(node, { label: `${name} over time`, height: 150, x: "duration", xName: "time", y: "number", linked: "time" }));
        }
        return metrics.get(name);
      }
      return {
        fill(data) {
          const s = data.series;
          const marks = data.marks.map((m) => ({ x: known(m.at_s) ? m.at_s : known(m.step) ? timeOf(s, m.step) : null, bad: m.kind !== "checkpoint" })).filter((m) => known(m.x));
          for (const { about, node, plot } of plots) {
            const shown = about.loss ? s.loss.some(known) : about.lines.some(([key]) => s[key].some(known));
            node.hidden = !shown;
            if (!shown) continue;
            if (about.loss) plot.set({ x: s.loss_step.map((step) => timeOf(s, step)), marks, series: [{ name: "loss", values: s.loss, colour: COLOURS.vermilion, kind: "line" }] });
            else plot.set({ x: s.at_s, marks, series: about.lines.filter(([key]) => s[key].some(known)).map(([key, name], i) => ({ name, values: s[key], colour: LINES[i], kind: "line", dash: i ? [5, 3] : undefined })) });
          }
          for (const [name, pairs] of Object.entries(s.metrics || {})) metric(name).set({ x: pairs.map(([step]) => timeOf(s, step)), marks, series: [{ name, values: pairs.map(([, v]) => v), colour: COLOURS.purple, kind: "line" }] });
          note.textContent = s.energy_note ? `Energy: ${s.energy_note}` : "";
        },
      };
    },
  });
}

function marksSection() {
  return new Section({
    id: "marks", title: "Events", needs: ["marks"],
    build(body, section) {
      const list = table(body, {
        label: "Events", sort: "at_s", descending: false, limit: 20, empty: "No save, failure or hang was recorded.",
        rowClass: (m) => (m.kind === "checkpoint" ? "" : "loud"),
        columns: [
          { key: "at_s", title: "after", numeric: true, format: duration }, { key: "kind", title: "what", cell: (m) => `${m.kind === "checkpoint" ? "◆" : "✕"} ${m.kind}` },
          { key: "step", title: "step", numeric: true, format: (v) => (known(v) ? count(v) : "–") }, { key: "rank", title: "rank", numeric: true, format: word },
          { key: "text", title: "text", cell: (m) => [m.text, states(m.details)] },
        ],
      });
      return {
        fill(data) { section.visible(data.marks.length > 0); list.set(data.marks); },
        focus: (e) => list.light(e.rows),
      };
    },
  });
}

// Of a hang: where every rank was, with its stack.
function states(details) {
  const found = details && Array.isArray(details.states) ? details.states : [];
  return found.length > 0 && el("details", { open: true }, el("summary", {}, `where ${plural(found.length, "rank")} ${found.length === 1 ? "was" : "were"}`),
    found.map((s) => el("div", { class: "stack" }, el("b", {}, `rank ${word(s.rank)}`), ` ${["phase " + word(s.phase), s.op && `in ${s.op}`, known(s.number) && `number ${s.number}`, known(s.since_s) && `for ${seconds(s.since_s)}`].filter(Boolean).join(", ")}`,
      Array.isArray(s.stack) && s.stack.length > 0 && el("pre", {}, s.stack.join("\n")))));
}
