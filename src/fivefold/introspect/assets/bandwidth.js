// What was expected and what was obtained: communication hidden and not, bandwidth, throughput.
"use strict";

function exposedSection() {
  return new Section({
    id: "exposed", title: "Exposed and hidden communication", short: "Exposed", needs: ["breakdown", "steady"],
    about: "By usage tag, per step, mean over ranks. Hidden communication runs beside computing and costs nothing.",
    build(body) {
      const bars = el("div", { class: "bars" });
      add(body, bars);
      return {
        fill(data) {
          const tags = data.breakdown.filter((p) => p.kind === "exposed");
          const whole = largest(tags.map((p) => p.seconds + (p.hidden_s || 0))) || 1;
          put(bars, tags.length ? tags.map((p) => el("div", { class: "row" },
            el("span", { class: "name" }, p.part),
            bar([{ name: "exposed", value: p.seconds, colour: tagColour(p.part), hatched: true }, { name: "hidden", value: p.hidden_s || 0, colour: tagColour(p.part) }], whole),
            el("span", { class: "told" }, el("b", {}, seconds(p.seconds)), " exposed · ", el("b", {}, seconds(p.hidden_s || 0)), " hidden",
              el("span", { class: "note" }, known(p.calls) ? ` · ${number(p.calls)} calls, ${bytes(p.bytes)}` : "")))) : el("p", { class: "none" }, "No communication was recorded."));
        },
      };
    },
  });
}

function calibrationSection() {
  return new Section({
    id: "calibration", title: "Bandwidth, expected and obtained", short: "Bandwidth", needs: ["calibration", "operations"],
    about: "Dashed: measured when the run started, over the same processes. Solid: what operations of the run reached. Bytes of a rank over the time of the operation.",
    build(body) {
      let data = null;
      const which = choice("operation", draw);
      const none = el("p", { class: "none" });
      const plotted = el("div", {});
      add(body, [none, plotted]);
      add(plotted, el("div", { class: "controls" }, which.node));
      const plot = chart(plotted, { label: "Algorithm bandwidth by message size", height: 230, x: "bucket", xName: "size from", y: "rate", log: true, zoom: false, summary: "" });
      const linked = el("div", {}, el("h3", {}, "Links between nodes, when the run started"));
      add(body, linked);
      const links = table(linked, {
        label: "Links between nodes, when the run started", sort: "bytes_per_s", descending: false, limit: 12,
        columns: [
          { key: "ranks", title: "ranks", value: (l) => (l.ranks || []).join(" – "), format: word }, { key: "hosts", title: "hosts", value: (l) => (l.hosts || []).join(" – "), format: word },
          { key: "latency_s", title: "latency", numeric: true, format: seconds }, { key: "bytes_per_s", title: "bandwidth", numeric: true, format: rate },
        ],
      });
      const used = el("div", {}, el("h3", {}, "Links between nodes, as they were used"));
      add(body, used);
      const ways = table(used, {
        label: "Links between nodes, as they were used", sort: "in_use", descending: true, limit: 12,
        columns: [
          { key: "from", title: "from", value: (l) => l.hosts[0], format: word }, { key: "to", title: "to", value: (l) => l.hosts[1], format: word },
          { key: "bytes_per_step", title: "per step", numeric: true, format: bytes }, { key: "in_use", title: "in use", numeric: true, format: share },
          { key: "bytes_per_s", title: "speed in use", numeric: true, format: rate },
        ],
      });

      function draw() {
        const curves = data.calibration.curves.filter((c) => c.operation === which.value);
        const found = data.operations.filter((o) => o.operation === which.value && known(o.algorithm_bytes_per_s));
        const buckets = [...new Set([...curves.flatMap((c) => c.sizes_bytes.map(bucketOf)), ...found.map((o) => bucketOf(o.size_from_bytes))])].filter((b) => b > 0).sort((a, b) => a - b);
        const series = [
          ...curves.map((c) => ({ name: curves.length > 1 ? `calibrated, group ${c.group}` : "calibrated", colour: COLOURS.grey, kind: "line", dash: [6, 4], join: true, values: buckets.map((b) => { const i = c.sizes_bytes.findIndex((s) => bucketOf(s) === b); return i < 0 ? null : c.bytes_per_s[i]; }) })),
          ...group(found, (o) => `${o.tag} · ${o.group}`).slice(0, 6).map(([name, os], i) => ({ name, colour: LINES[i], kind: "line", join: true, values: buckets.map((b) => mean(os.filter((o) => bucketOf(o.size_from_bytes) === b).map((o) => o.algorithm_bytes_per_s))) })),
        ];
        plot.node.hidden = !buckets.length;
        if (buckets.length) plot.set({ x: buckets, series });
      }
      return {
        fill(fresh) {
          data = fresh;
          const names = [...new Set([...data.calibration.curves.map((c) => c.operation), ...data.operations.filter((o) => known(o.algorithm_bytes_per_s)).map((o) => o.operation)])];
          which.set(names.map((n) => [n, n]));
          const nothing = !data.calibration.curves.length;
          none.hidden = !nothing;
          none.textContent = nothing ? "This run has no calibration: what its operations reached cannot be compared with what the machine can do." : "";
          plotted.hidden = !names.length;
          linked.hidden = !data.calibration.links.length;
          links.set(data.calibration.links);
          used.hidden = !data.calibration.used.length;
          ways.set(data.calibration.used);
          if (names.length) draw();
        },
        focus(e) {
          const row = e.rows.map((i) => data.operations[i]).find(Boolean);
          if (row) which.value = row.operation;
          if (which.value) draw();
        },
      };
    },
  });
}

function throughputSection() {
  return new Section({
    id: "throughput", title: "Throughput, expected and obtained", short: "Throughput", needs: ["throughput"],
    build(body) {
      const bars = el("div", { class: "bars" });
      add(body, bars);
      return {
        fill(data) {
          const t = data.throughput, estimated = t.one_process_from === "estimated", whole = largest([t.expected_samples_per_s, t.samples_per_s]);
          const line = (name, value, colour, hatched, told) => known(value) && el("div", { class: "row" }, el("span", { class: "name" }, name), bar([{ name, value, colour, hatched }], whole), el("span", { class: "told" }, el("b", {}, number(value)), " samples per second", told && el("span", { class: "note" }, ` ${told}`)));
          put(bars, known(t.samples_per_s) ? [
            line("one process", t.one_process_samples_per_s, COLOURS.grey, estimated, estimated ? "estimated: as if one process did the work of all ranks without waiting" : t.one_process_run && `measured in ${t.one_process_run}`),
            line("one process × ranks", t.expected_samples_per_s, COLOURS.pale, estimated, "expected"),
            line("obtained", t.samples_per_s, COLOURS.blue, false, known(t.ratio) ? `${estimated ? "at most " : ""}${share(t.ratio)} of what was expected` : "one process alone was not measured: nothing to compare with"),
          ] : el("p", { class: "none" }, "How many samples a step has was not recorded."));
        },
      };
    },
  });
}
