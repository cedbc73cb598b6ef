// What was run and decided, where the threads were, and what this report lacks.
"use strict";

const shown = (value) => (typeof value === "string" ? value : JSON.stringify(value));

function configurationRows(data) {
  const c = data.configuration;
  return [
    ...c.plan.map((p) => ({ section: "plan", key: p.key, setting: shown(p.value), origin: p.origin })),
    ...c.environment.map((e) => ({ section: "environment", key: e.name, setting: shown(e.value), origin: e.ranks ? `ranks ${e.ranks.join(", ")}` : "all ranks" })),
    ...Object.entries(c.versions).map(([key, v]) => ({ section: "version", key, setting: shown(v), origin: "" })),
    ...flat(c.placement || {}).map(([key, v]) => ({ section: "placement", key, setting: shown(v), origin: "" })),
  ];
}

// Nested values as dotted names.
function flat(value, before = "") {
  if (value === null || typeof value !== "object") return [[before, value]];
  const entries = Object.entries(value);
  if (Array.isArray(value) && value.every((v) => v === null || typeof v !== "object")) return [[before, value]];
  return entries.flatMap(([key, v]) => flat(v, before ? `${before}.${key}` : key));
}

function quoted(words) {
  return words.map((w) => (/^[\w@%+=:,./-]+$/.test(w) ? w : `'${String(w).replaceAll("'", "'\\''")}'`)).join(" ");
}

function configurationSection() {
  return new Section({
    id: "configuration", title: "Placement, command and configuration", short: "Configuration", needs: ["configuration", "run"],
    about: "Every value with its origin: default, chosen by the user, or tuned.",
    build(body) {
      const top = el("div", {});
      let all = [];
      const filter = filterBox("Filter configuration", (words) => list.filter(words));
      const chosen = el("input", { type: "checkbox", on: { change: () => draw() } });
      add(body, [top, el("div", { class: "controls" }, filter, el("label", { class: "choice" }, chosen, "without defaults"))]);
      const list = table(body, {
        label: "Configuration", limit: 18, empty: "No configuration was recorded.",
        columns: [
          { key: "section", title: "where", format: word }, { key: "key", title: "name", format: word, code: true },
          { key: "setting", title: "value", format: word, code: true }, { key: "origin", title: "origin", format: word },
        ],
      });
      function draw() {
        list.set(all.filter((row) => !chosen.checked || !String(row.origin).startsWith("default")));
      }
      return {
        fill(data) {
          const run = data.run;
          put(top, el("pre", { class: "command", "aria-label": "command", tabindex: "0" }, run.command.length ? quoted(run.command) : "the command was not recorded"), facts([
            ["processes", count(run.size)], ["processes per node", count(run.per_node)], ["nodes", count(run.nodes)], ["threads per process", known(run.threads) ? count(run.threads) : null],
            ["engine", run.engine], ["launcher", run.launcher], ["backend", run.backend], ["device", run.device],
            ["layout", Object.entries(run.layout).map(([axis, n]) => `${axis} ${n}`).join(" × ") || null],
            ["hosts", run.hosts.length > 6 ? `${run.hosts.slice(0, 6).join(", ")} and ${run.hosts.length - 6} more` : run.hosts.join(", ")],
            ["clocks agree within", run.clock_error_s > 0 ? seconds(run.clock_error_s) : null],
          ]));
          all = configurationRows(data);
          draw();
        },
        focus: (e) => list.light(e.rows),
      };
    },
  });
}

function stacksSection() {
  return new Section({
    id: "stacks", title: "Where the main thread is", short: "Stacks", needs: ["stacks"],
    about: "Seen about twenty times a second: the innermost line of your own code, by phase.",
    build(body, section) {
      let data = null;
      const who = choice("of", () => draw());
      const lists = el("div", { class: "grid" });
      add(body, [el("div", { class: "controls" }, who.node), lists]);
      function draw() {
        const phases = data.stacks[who.value] || {};
        put(lists, Object.entries(phases).map(([phase, found]) => {
          const total = sum(found.map(([, n]) => n)) || 1;
          return el("div", {}, el("h3", {}, phase), el("ol", { class: "places" }, found.slice(0, 12).map(([place, n]) => el("li", {},
            el("span", { class: "told" }, share(n / total)), bar([{ name: place, value: n, colour: phaseColour(phase) }], total), el("code", {}, place)))));
        }));
      }
      return {
        fill(fresh) {
          data = fresh;
          const names = Object.keys(data.stacks).filter((k) => Object.keys(data.stacks[k]).length).sort((a, b) => (a === "all" ? -1 : b === "all" ? 1 : a - b));
          section.visible(names.length > 0);
          who.set(names.map((k) => [k, k === "all" ? "all ranks" : `rank ${k}`]));
          draw();
        },
        focus(e) {
          const rank = e.ranks.map(String).find((r) => data.stacks[r]);
          if (rank) who.value = rank;
          draw();
        },
      };
    },
  });
}

function problemsSection() {
  return new Section({
    id: "problems", title: "What is missing or doubtful", short: "Missing", needs: ["problems"],
    build(body, section) {
      const list = el("ul", { class: "problems" });
      add(body, list);
      return {
        fill(data) {
          section.visible(data.problems.length > 0);
          put(list, data.problems.map((text) => el("li", {}, text)));
        },
      };
    },
  });
}
