// Where a step goes: the mean of steady steps, every step by phase, and ranks by steps.
"use strict";

const OTHER = "other";

function breakdownSection() {
  return new Section({
    id: "breakdown", title: "Where a step goes", short: "A step", needs: ["breakdown", "steady"],
    about: "Mean over ranks and steady steps. Hatched: exposed communication, in which a rank could do nothing but wait.",
    build(body) {
      let parts = [];
      const whole = el("div", {});
      add(body, whole);
      const colour = (part) => (part.kind === "phase" ? phaseColour(part.part) : part.kind === "other" ? COLOURS.pale : tagColour(part.part));
      const list = table(body, {
        label: "Parts of a step", sort: "seconds", empty: "No step has ended yet.",
        columns: [
          { key: "part", title: "part", cell: (p) => el("span", {}, swatch(colour(p), p.kind === "exposed"), p.part) },
          { key: "kind", title: "what", format: (k) => ({ phase: "work", exposed: "exposed", other: "in no phase" })[k] || k },
          { key: "seconds", title: "per step", numeric: true, format: seconds },
          { key: "share", title: "share", numeric: true, format: share },
          { key: "least_s", title: "least", numeric: true, format: seconds, help: "of the rank that has least" },
          { key: "most_s", title: "most", numeric: true, format: seconds },
          { key: "most_rank", title: "on rank", numeric: true, format: word },
          { key: "hidden_s", title: "hidden", numeric: true, format: seconds, help: "communication beside computing" },
        ],
      });
      return {
        fill(data) {
          const total = sum(data.breakdown.map((p) => p.seconds)) || 1;
          put(whole, bar(data.breakdown.map((p) => ({ name: p.part, value: p.seconds, colour: colour(p), hatched: p.kind === "exposed", text: `${p.part}: ${seconds(p.seconds)}, ${share(p.share)}` })), total));
          whole.firstChild.classList.add("tall");
          parts = data.breakdown;
          list.set(parts);
        },
        focus: (e) => list.light(e.rows.length ? e.rows : parts.flatMap((p, i) => (p.part === (p.kind === "exposed" ? e.tag : e.phase) ? [i] : []))),
      };
    },
  });
}

// The levels of a stack, those of a step's end on top: [{name, values, colour, hatched}].
// Of all ranks it is their mean, which adds up; where only some ranks are kept, the median of each part.
function levels(line, all, mode, steps) {
  const part = (value) => (all && value.median ? value.median : value);
  const step = part(line.step_s);
  const found = mode === "phases"
    ? steps.phases.filter((p) => line.phase_s[p]).map((p) => ({ name: p, values: part(line.phase_s[p]), colour: phaseColour(p) }))
    : [{ name: "work", values: part(line.work_s), colour: phaseColour("work") },
      ...steps.tags.filter((t) => line.exposed_s[t]).map((t) => ({ name: `exposed: ${t}`, values: part(line.exposed_s[t]), colour: tagColour(t), hatched: true }))];
  if (mode === "phases") {
    const rest = step.map((v, i) => (known(v) ? Math.max(0, v - sum(found.map((f) => f.values[i]))) : null));
    if (largest(rest) > 0.005 * largest(step)) found.push({ name: "in no phase", values: rest, colour: COLOURS.pale });
  }
  const stack = found.map((f) => ({ ...f, kind: "stack" })).reverse();
  if (all) stack.push({ name: "slowest rank", values: steps.step_s.most, colour: ink("--ink"), kind: "line", steps: true, width: 1 });
  return stack;
}

// The mean over ranks of every column, as if it were a rank.
function average(ranks) {
  const found = Object.values(ranks);
  const columns = (pick) => {
    const given = found.map(pick);
    const first = given.find(Boolean) || [];
    return first.map((_, i) => mean(given.map((c) => (c ? c[i] : 0))));
  };
  const parts = (key) => Object.fromEntries([...new Set(found.flatMap((r) => Object.keys(r[key])))].map((name) => [name, columns((r) => r[key][name])]));
  return { step_s: columns((r) => r.step_s), work_s: columns((r) => r.work_s), phase_s: parts("phase_s"), exposed_s: parts("exposed_s") };
}

function everybody(data) {
  const t = data.timeline;
  return Object.keys(t.ranks).length === data.run.read ? average(t.ranks) : t;
}

function rankName(data, rank) {
  const i = data.ranks.rank.indexOf(Number(rank));
  return i >= 0 && data.ranks.host[i] ? `rank ${rank} · ${data.ranks.host[i]}` : `rank ${rank}`;
}

function stepMarks(data) {
  return data.marks.filter((m) => known(m.step)).map((m) => ({ x: m.step, bad: m.kind !== "checkpoint" }));
}

function timelineSection() {
  return new Section({
    id: "timeline", title: "Steps", needs: ["timeline", "marks", "steady", "ranks"],
    about: "Time of every step. Drag to zoom; steps outside the steady ones are on grey.",
    build(body) {
      let data = null;
      const who = choice("of", (rank) => view.choose(rank));
      const mode = choice("by", () => draw());
      mode.set([["phases", "phase"], ["exposed", "work and exposed communication"]]);
      const note = el("span", { class: "note" });
      add(body, el("div", { class: "controls" }, who.node, mode.node, note));
      const plot = chart(body, { label: "Time of steps by phase", height: 280, y: "seconds" });
      view.watchers.add(() => { if (data) { who.value = view.rank; draw(); } });

      function draw() {
        const t = data.timeline;
        const all = !t.ranks[view.rank];
        if (all) who.value = "all";
        const line = all ? everybody(data) : t.ranks[view.rank];
        const n = t.first_step.length;
        plot.set({
          x: t.first_step, end: n ? t.first_step[n - 1] + t.steps[n - 1] : undefined, series: levels(line, all, mode.value, t),
          marks: stepMarks(data), steady: data.steady && [data.steady.first_step, data.steady.last_step + 1],
        });
        const full = Object.keys(t.ranks).length;
        note.textContent = view.rank !== "all" && all ? `rank ${view.rank} is told in sum only` : full < data.run.read ? `${full} of ${count(data.run.read)} ranks are kept in full` : "";
      }
      return {
        fill(fresh) {
          data = fresh;
          const ranks = Object.keys(data.timeline.ranks).sort((a, b) => a - b);
          who.set([["all", `all ranks (${ranks.length === data.run.read ? "mean" : "median"} of ${count(data.run.read)})`], ...ranks.map((r) => [r, rankName(data, r)])]);
          who.value = data.timeline.ranks[view.rank] ? view.rank : "all";
          draw();
        },
        focus(e) {
          if (e.tag) mode.value = "exposed";
          else if (e.phase) mode.value = "phases";
          view.choose(e.ranks.length === 1 ? e.ranks[0] : "all");
        },
      };
    },
  });
}

const HEATS = {
  late_s: { text: "how late: work beyond the median rank", words: ["early", "", "late"], name: "later than the median by" },
  work_s: { text: "work: the step without exposed communication", words: ["less", "more"], name: "work" },
  exposed_s: { text: "exposed communication", words: ["none", "much"], name: "exposed" },
};

function heatSection(reveal) {
  return new Section({
    id: "heat", title: "Ranks by step", needs: ["heat", "steady"],
    about: "A row is a rank, a column a step. Whoever waits least is late: look for a warm row. Click a row for its rank.",
    build(body) {
      let data = null, focused = [];
      const what = choice("show", () => draw());
      what.set(Object.entries(HEATS).map(([key, { text }]) => [key, text]));
      add(body, el("div", { class: "controls" }, what.node));
      const name = ([a, b]) => (a === b ? `${a}` : `${a}–${b}`);
      const map = heatMap(body, {
        label: "Heat map of ranks by step",
        pick: (row) => reveal(row.ranks),
        describe: (row, column, value) => `rank ${row.name}, step ${column.name}: ${HEATS[what.value].name} ${value < 0 && what.value === "late_s" ? "−" + seconds(-value) : seconds(value)}`,
      });

      function draw() {
        const values = data.heat[what.value];
        const flat = values.flat().filter(known).map(Math.abs).sort((a, b) => a - b);
        // One late rank of a thousand is less than a hundredth of the cells: its mean counts as well.
        const usual = largest(values.map((row) => Math.abs(mean(row) || 0)));
        const scale = flat.length ? Math.max(flat[Math.floor((flat.length - 1) * 0.99)], usual) || flat[flat.length - 1] : 1;
        const step = data.steady ? data.steady.step_s_p50 : 0;
        const rows = data.heat.ranks.map((ranks, i) => {
          const usual = mean(values[i]);
          const named = focused.some((r) => r >= ranks[0] && r <= ranks[1]);
          return { ranks, name: name(ranks), values: values[i], loud: named || (what.value === "late_s" && step > 0 && usual > 0.05 * step) };
        });
        const columns = data.heat.first_step.map((first, i) => ({ name: data.heat.steps[i] > 1 ? `${first}–${first + data.heat.steps[i] - 1}` : `${first}` }));
        map.set(rows, columns, scale, HEATS[what.value].words.map((w, i, all) => (i === 0 && all.length > 2 ? `${seconds(scale)} ${w}` : i === all.length - 1 ? `${seconds(scale)} ${w}` : w)));
      }
      return {
        fill(fresh) { data = fresh; draw(); },
        focus(e) { focused = e.ranks; draw(); },
      };
    },
  });
}
