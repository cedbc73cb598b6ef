// Collectives and messages: how many, how long, by usage tag, operation and size.
"use strict";

const ANY = "";

function operationsSection() {
  return new Section({
    id: "operations", title: "Operations", needs: ["operations"],
    about: "Collectives and messages of all ranks over the whole run; sizes are powers of two.",
    build(body) {
      let all = [], rows = [];
      const pick = { tag: choice("usage tag", draw), operation: choice("operation", draw), group: choice("group", draw) };
      const figures = el("div", {});
      const pair = el("div", { class: "pair" });
      const [left, right] = [el("div", {}, el("h3", {}, "Latency by message size")), el("div", {}, el("h3", {}, "Count by message size"))];
      add(body, [el("div", { class: "controls" }, Object.values(pick).map((c) => c.node)), figures, add(pair, [left, right])]);
      const latency = chart(left, { label: "Latency by message size", height: 210, x: "bucket", xName: "size from", y: "seconds", log: true, zoom: false, summary: "" });
      const counts = chart(right, { label: "Count by message size", height: 210, x: "bucket", xName: "size from", y: "count", log: true, zoom: false, summary: "" });
      const list = table(body, {
        label: "Operations by size", sort: "total_s", limit: 14, empty: "No operation was recorded.",
        columns: [
          { key: "operation", title: "operation", format: word }, { key: "tag", title: "usage tag", format: word }, { key: "group", title: "group", format: word },
          { key: "size_from_bytes", title: "message size", numeric: true, cell: (o) => power(bucketOf(o.size_from_bytes)), help: "from this to twice of it" },
          { key: "count", title: "count", numeric: true, format: count },
          { key: "mean_s", title: "average", numeric: true, format: seconds }, { key: "min_s", title: "min", numeric: true, format: seconds },
          { key: "max_s", title: "max", numeric: true, format: seconds }, { key: "p99_s", title: "99 %", numeric: true, format: seconds, help: "one in a hundred takes longer" },
          { key: "total_s", title: "total", numeric: true, format: seconds },
          { key: "exposed_s", title: "exposed", numeric: true, format: seconds }, { key: "hidden_s", title: "hidden", numeric: true, format: seconds },
          { key: "algorithm_bytes_per_s", title: "bandwidth", numeric: true, format: rate, help: "algorithm bandwidth: bytes over time from the last arrival to the end" },
          { key: "expected_ratio", title: "of calibration", numeric: true, cell: (o) => el("span", { class: known(o.expected_ratio) && o.expected_ratio < 0.5 ? "warn" : "" }, (known(o.expected_ratio) && o.expected_ratio < 0.5 ? "▼ " : "") + share(o.expected_ratio)) },
        ],
      });

      function draw() {
        rows = all.filter((o) => Object.entries(pick).every(([key, c]) => c.value === ANY || o[key] === c.value));
        list.set(rows);
        const calls = sum(rows.map((o) => o.count)), total = sum(rows.map((o) => o.total_s));
        put(figures, facts([
          ["total calls", count(calls)], ["total time", duration(total), "all ranks together"], ["moved", bytes(sum(rows.map((o) => o.bytes)))],
          ["exposed", total ? `${duration(sum(rows.map((o) => o.exposed_s)))} · ${share(sum(rows.map((o) => o.exposed_s)) / total)}` : null],
          ["of it, waiting", rows.some((o) => known(o.waiting_s)) ? duration(sum(rows.map((o) => o.waiting_s ?? 0))) : null, "until all ranks had come"], ["hidden", duration(sum(rows.map((o) => o.hidden_s)))],
        ]));
        const buckets = [...new Set(rows.map((o) => bucketOf(o.size_from_bytes)))].sort((a, b) => a - b);
        const at = (found, value) => buckets.map((b) => { const here = found.filter((o) => bucketOf(o.size_from_bytes) === b); return here.length ? value(here) : null; });
        const lines = group(rows, (o) => `${o.operation} · ${o.tag}`).slice(0, LINES.length);
        latency.set({ x: buckets, series: [
          ...lines.map(([name, found], i) => ({ name, values: at(found, (os) => sum(os.map((o) => o.total_s)) / sum(os.map((o) => o.count)) || null), colour: LINES[i], kind: "line", join: true, dash: i > 3 ? [6, 3] : undefined })),
          ...(lines.length === 1 ? [["min", Math.min, "min_s"], ["max", Math.max, "max_s"]].map(([name, pickOne, key]) => ({ name, values: at(lines[0][1], (os) => pickOne(...os.map((o) => o[key])) || null), colour: COLOURS.grey, kind: "line", join: true, dash: [2, 3] })) : []),
        ] });
        counts.set({ x: buckets, series: [{ name: "calls", values: at(rows, (os) => sum(os.map((o) => o.count))), colour: COLOURS.blue, kind: "bars" }] });
      }
      return {
        fill(data) {
          all = data.operations.map((o, index) => ({ ...o, index }));
          for (const key of Object.keys(pick)) pick[key].set([[ANY, "all"], ...group(all, (o) => o[key]).map(([v, os]) => [v, `${v} (${count(sum(os.map((o) => o.count)))})`])]);
          draw();
        },
        focus(e) {
          for (const c of Object.values(pick)) c.value = ANY;
          if (e.tag && all.some((o) => o.tag === e.tag) && e.rows.every((i) => all[i] && all[i].tag === e.tag)) pick.tag.value = e.tag;
          draw();
          list.light(e.rows);
        },
      };
    },
  });
}

// Rows by key, those with most time first: [[key, rows], ...].
function group(rows, key) {
  const found = new Map();
  for (const row of rows) {
    if (!found.has(key(row))) found.set(key(row), []);
    found.get(key(row)).push(row);
  }
  return [...found].sort((a, b) => sum(b[1].map((o) => o.total_s)) - sum(a[1].map((o) => o.total_s)));
}
