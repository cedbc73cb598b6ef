// Helpers: what each did, and who waits for whom.
"use strict";

function helperSection() {
  return new Section({
    id: "offload", title: "Helpers", needs: ["offload"],
    about: "Over the whole run. Helpers are extra hardware: a helper that waits could do more, a trainer that waits needs more of them.",
    build(body, section) {
      const list = table(body, {
        label: "Helpers", sort: "number", descending: false, limit: 16, empty: "No helper was there.",
        rowClass: (h) => (["lost", "retired", "refused"].includes(h.state) ? "loud" : ""),
        columns: [
          { key: "number", title: "helper", numeric: true, format: word },
          { key: "name", title: "name", format: word },
          { key: "state", title: "state", cell: (h) => (h.why ? `${h.state}: ${h.why}` : h.state) },
          { key: "busy_share", title: "computes", numeric: true, format: share },
          { key: "waited_share", title: "waits for trainers", numeric: true, format: share, help: "it had no lease of anybody" },
          { key: "leases", title: "leases", numeric: true, format: count, help: "answers that were used" },
          { key: "evaluated", title: "of validation", numeric: true, format: count },
          { key: "duplicates", title: "duplicates", numeric: true, format: count, help: "another had answered already" },
          { key: "lost", title: "not answered", numeric: true, format: count, help: "leases that others got" },
          { key: "bytes", title: "received", numeric: true, format: bytes },
        ],
      });
      const heading = el("h3", {}, "Trainers that they serve");
      add(body, heading);
      const supply = table(body, {
        label: "Trainers with helpers", sort: "rank", descending: false, limit: 16, empty: "No loader had helpers.",
        columns: [
          { key: "rank", title: "rank", numeric: true, format: word },
          { key: "batches", title: "batches", numeric: true, format: count },
          { key: "own", title: "made itself", numeric: true, format: count },
          { key: "waited_s", title: "waits for helpers", numeric: true, format: seconds, help: "per batch" },
          { key: "empty_share", title: "none ready", numeric: true, format: share, help: "of batches, when the loop asked" },
          { key: "occupancy", title: "ready", numeric: true, format: number, help: "batches, when the loop asked: near 0 the loop waits for helpers, near the depth helpers wait for the loop" },
          { key: "depth", title: "depth", numeric: true, format: number, help: "batches that helpers may be ahead" },
        ],
      });
      return {
        fill(data) {
          section.visible(data.offload.helpers.length > 0);
          list.set(data.offload.helpers);
          supply.set(data.offload.supply);
        },
        focus: (e) => list.light(e.rows),
      };
    },
  });
}
