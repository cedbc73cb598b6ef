// Puts the page together, and keeps it up to date while a run goes on.
"use strict";

class Report {
  constructor(host, data) {
    const reveal = (ranks) => this.reveal(ranks);
    const show = (evidence) => this.show(evidence);
    view.watchers.clear();
    view.rank = "all";
    this.sections = [
      breakdownSection(), timelineSection(), heatSection(reveal), rankSection(reveal), operationsSection(), exposedSection(),
      calibrationSection(), throughputSection(), seriesSection(), marksSection(), arrivalSection(reveal), helperSection(),
      configurationSection(), stacksSection(), problemsSection(),
    ];
    const nav = el("nav", { class: "sections", "aria-label": "Sections" }, this.sections.map((s) => el("a", { href: `#s-${s.id}`, on: { click: (e) => { e.preventDefault(); s.show(); } } }, s.short)));
    this.links = [...nav.children];
    const head = el("div", {});
    this.summary = summary(head, show);
    add(host, [head, nav, this.sections.map((s) => s.node)]);
    this.told = {};
    this.fill(data);
  }

  // Fills what has changed: at first everything, what is in sight before the rest.
  fill(data) {
    this.data = data;
    const changed = new Set(Object.keys(data).filter((key) => {
      const now = JSON.stringify(data[key]);
      const same = this.told[key] === now;
      this.told[key] = now;
      return !same;
    }));
    this.summary.fill(data);
    this.sections.forEach((section, i) => {
      if (!section.needs.some((key) => changed.has(key))) return;
      section.fill(data);
      this.links[i].hidden = section.node.hidden;
    });
  }

  show(evidence) {
    const section = this.sections.find((s) => s.id === evidence.section);
    if (section) section.show({ rows: [], ranks: [], phase: null, tag: null, ...evidence });
  }

  // A rank, or of several the one that is kept in full.
  reveal([first, last]) {
    const kept = Object.keys(this.data.timeline.ranks).map(Number).filter((r) => r >= first && r <= last);
    view.choose(kept.length ? kept[0] : first);
    this.sections.find((s) => s.id === "timeline").show();
  }
}

function openComparison(host, data) {
  const holder = el("div", {});
  const main = el("div", {});
  const back = button("← both runs", () => { put(holder); holder.hidden = true; main.hidden = false; back.hidden = true; scrollTo(0, 0); }, { class: "open", hidden: true });
  add(host, [back, main, holder]);
  comparison(main, data, (i) => {
    main.hidden = true;
    back.hidden = holder.hidden = false;
    put(holder);
    scrollTo(0, 0);
    new Report(holder, data.documents[i]);
  });
}

// The server sends parts of the document that have changed: {part: value}. They are shown when no button is held: what is
// being dragged must not be replaced.
function follow(report, data, sign) {
  let current = data, held = false, waiting = false;
  const events = new EventSource("events");
  const say = (text, on) => { put(sign, el("span", { class: on ? "dot on" : "dot", "aria-hidden": "true" }), text); };
  say("live", true);
  events.addEventListener("parts", (event) => {
    current = { ...current, ...JSON.parse(event.data) };
    if (held) waiting = true;
    else show();
  });
  const show = () => {
    waiting = false;
    report.fill(current);
    say(`live · ${new Date(current.made).toLocaleTimeString("en-GB")}`, true);
    document.body.dataset.updates = Number(document.body.dataset.updates || 0) + 1;
  };
  const release = () => {
    held = false;
    if (waiting) show();
  };
  addEventListener("pointerdown", () => { held = true; }, true);
  for (const end of ["pointerup", "pointercancel", "blur"]) addEventListener(end, release);
  events.addEventListener("problem", (event) => say(JSON.parse(event.data), false));
  events.addEventListener("error", () => say("the server does not answer; trying again", false));
}

function start() {
  const data = JSON.parse(document.getElementById("document").textContent);
  const sign = el("span", { class: "live", role: "status" });
  const main = el("main", { id: "report" });
  const made = new Date(data.made);
  put(document.getElementById("page"), el("div", { class: "banner" }, el("span", { class: "brand" }, "Fivefold"), el("span", { class: "made" }, "report", Number.isNaN(+made) ? "" : ` of ${made.toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "short" })}`), sign), main);
  if (data.kind === "comparison") openComparison(main, data);
  else {
    const report = new Report(main, data);
    if (document.body.dataset.live === "true") follow(report, data, sign);
  }
  document.body.dataset.ready = String(Math.round(performance.now()));
}

start();
