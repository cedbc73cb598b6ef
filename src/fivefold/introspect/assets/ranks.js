// One line per rank, one rank in full, and who waited for whom.
"use strict";

function rankRows(ranks) {
  return ranks.rank.map((_, i) => {
    const row = {};
    for (const [key, column] of Object.entries(ranks)) if (Array.isArray(column)) row[key] = column[i];
    for (const [phase, column] of Object.entries(ranks.phase_s || {})) row[`phase ${phase}`] = column[i];
    return row;
  });
}

const FULL = [
  ["host", "host", word], ["coordinates", "coordinates", word], ["cores", "cores granted", word], ["pid", "process", word],
  ["state", "state", word], ["step", "step", count], ["phase", "phase", word], ["step_s", "a step takes", seconds],
  ["work_s", "work", seconds], ["exposed_s", "exposed communication", seconds], ["late_s", "late at operations", seconds],
  ["last_share", "comes last", share], ["cpu_share", "cores in use", number], ["run_delay_share", "ready, no core", share],
  ["throttled_share", "throttled", share], ["samples", "samples per step", number], ["ready", "batches ready", number],
  ["rss_bytes", "memory", bytes], ["rss_growth_bytes", "growth per step", bytes], ["gpu_busy", "GPU busy", share], ["gpu_bytes", "GPU memory", bytes],
];

function rankSection(reveal) {
  return new Section({
    id: "ranks", title: "Ranks", needs: ["ranks", "timeline"], about: "Per steady step. Choose one to see it in full, here and in the steps.",
    build(body) {
      let data = null;
      const card = el("div", { class: "card", "aria-live": "polite" });
      const filter = filterBox("Filter ranks", (words) => list.filter(words));
      add(body, [card, el("div", { class: "controls" }, filter)]);
      const list = table(body, {
        label: "Ranks", sort: "rank", descending: false, limit: 16, pick: (row) => reveal([row.rank, row.rank]),
        rowClass: (row) => (String(row.rank) === view.rank ? "chosen" : row.outstanding ? "loud" : ""),
        columns: [
          { key: "rank", title: "rank", numeric: true, format: word },
          { key: "host", title: "host", format: word },
          { key: "step_s", title: "step", numeric: true, format: seconds },
          { key: "work_s", title: "work", numeric: true, format: seconds, help: "the step without exposed communication" },
          { key: "exposed_s", title: "exposed", numeric: true, format: seconds, help: "waits least: is late" },
          { key: "late_s", title: "late", numeric: true, format: seconds, help: "behind the median of ranks at operations" },
          { key: "last_share", title: "last", numeric: true, format: share, help: "of operations, those it came to last" },
          { key: "cpu_share", title: "cores used", numeric: true, format: number },
          { key: "run_delay_share", title: "no core", numeric: true, format: share, help: "ready to run, and another had the core" },
          { key: "ready", title: "batches ready", numeric: true, format: number },
          { key: "rss_bytes", title: "memory", numeric: true, format: bytes },
        ],
      });
      function draw() {
        list.redraw();
        const row = rankRows(data.ranks).find((r) => String(r.rank) === view.rank);
        put(card, row && [el("h3", {}, `Rank ${row.rank}`), facts([...FULL.map(([key, name, format]) => [name, format(row[key])]), ...Object.keys(data.ranks.phase_s || {}).map((p) => [p, seconds(row[`phase ${p}`])])])]);
        card.hidden = !row;
      }
      view.watchers.add(() => data && draw());
      return {
        fill(fresh) { data = fresh; list.set(rankRows(data.ranks)); draw(); },
        focus(e) { list.light(data.ranks.rank.flatMap((r, i) => (e.ranks.includes(r) ? [i] : []))); },
      };
    },
  });
}

const rankSpan = ([a, b]) => (a === b ? String(a) : `${a}–${b}`);

function arrivalSection(reveal) {
  return new Section({
    id: "arrivals", title: "Who waits for whom", short: "Waiting", needs: ["arrivals"],
    about: "From the operations that are still in the rings of all ranks: the row waits for the column.",
    build(body) {
      const figures = el("div", {});
      add(body, figures);
      const matrix = el("div", {});
      add(body, [matrix, el("h3", {}, "Operations with the largest skew")]);
      let unit = "";
      const map = heatMap(matrix, {
        label: "Who waits for whom", square: true, pick: (row) => reveal(row.ranks),
        describe: (row, column, value) => `rank ${row.name} waits for rank ${column.name}: ${seconds(value)} per step${unit}`,
      });
      const list = table(body, {
        label: "Operations with the largest skew", sort: "skew_s", limit: 10, empty: "No operation was found on all ranks of its group.",
        columns: [
          { key: "operation", title: "operation", format: word }, { key: "tag", title: "usage tag", format: word },
          { key: "group", title: "group", format: word }, { key: "step", title: "step", numeric: true, format: count },
          { key: "size_bytes", title: "size", numeric: true, format: bytes }, { key: "skew_s", title: "last after first", numeric: true, format: seconds },
          { key: "first", title: "first", numeric: true, format: word }, { key: "last", title: "last", numeric: true, format: word },
          { key: "last_phase", title: "last was in", format: word },
        ],
      });
      return {
        fill(data) {
          const a = data.arrivals;
          put(figures, facts([["operations compared", count(a.compared)], ["steps", known(a.first_step) ? `${a.first_step}–${a.last_step}` : null], ["middle skew", seconds(a.skew_p50_s)], ["one in ten above", seconds(a.skew_p90_s)]]));
          const many = a.waited_s.length > 1;
          matrix.hidden = !many;
          if (many) {
            const scale = largest(a.waited_s.flat()) || 1;
            const rows = a.blocks.map((ranks, i) => ({ ranks, name: rankSpan(ranks), values: a.waited_s[i] }));
            map.set(rows, a.blocks.map((ranks) => ({ name: rankSpan(ranks) })), scale > 0 ? scale : 1, ["0", `${seconds(scale)} per step`]);
          }
          list.set(a.late);
        },
        focus: (e) => list.light(e.rows),
      };
    },
  });
}
