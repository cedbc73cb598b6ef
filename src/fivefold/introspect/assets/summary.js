// What a reader sees first: what ran, the verdict, and what to do, with the evidence a click away.
"use strict";

const SIGNS = { good: "✓", notice: "!", bad: "✕" };
const LEVELS = { good: "nothing to gain", notice: "something to gain", bad: "needs attention" };

function verdict(data) {
  return el("div", { class: `verdict ${data.level}` },
    el("span", { class: "sign", role: "img", "aria-label": LEVELS[data.level] || data.level }, SIGNS[data.level] || "?"),
    el("h1", { id: "verdict", class: data.text.length > 150 ? "long" : null }, kept(data.text)));
}

function facts(pairs) {
  return el("dl", { class: "facts" }, pairs.filter(([, value]) => known(value) && value !== "–").map(([name, value, about]) =>
    el("div", { title: about }, el("dt", {}, name), el("dd", {}, value))));
}

const STATES = { ended: "ended", running: "running", failed: "failed", killed: "killed" };

function header(run) {
  const started = run.started ? new Date(run.started) : null;
  const told = [
    plural(run.size, "rank"), plural(run.nodes, "node"), run.backend && `backend ${run.backend}`, run.device,
    started && !Number.isNaN(+started) && started.toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "short" }),
    run.seconds ? duration(run.seconds) : null,
  ];
  return el("div", { class: "run" }, el("span", { class: "title" }, run.title),
    el("span", { class: `state ${run.state}` }, STATES[run.state] || run.state),
    told.filter(Boolean).map((text) => el("span", { class: "fact" }, text)));
}

const NAMES = {
  timeline: "steps", heat: "ranks by step", ranks: "ranks", operations: "operations", arrivals: "arrivals",
  series: "over time", configuration: "configuration", stacks: "where threads are", calibration: "bandwidth",
  marks: "events", problems: "what is missing", breakdown: "where a step goes", throughput: "throughput",
  offload: "helpers",
};

function finding(data, n, show) {
  const gain = known(data.gain_s_per_step) && data.gain_s_per_step > 0;
  const first = data.evidence[0];
  const told = gain ? [el("strong", {}, `up to ${seconds(data.gain_s_per_step)}`), " per step", known(data.share) ? ` · ${share(data.share)}` : ""]
    : known(data.share) ? [el("strong", {}, share(data.share)), " of the step"] : ["not measured in time"];
  return el("li", { class: "finding", "data-id": data.id },
    button([el("span", { class: "n", "aria-hidden": "true" }, String(n)), el("span", { class: "what" }, sentence(data.title)), el("span", { class: "gain" }, told)],
      () => first && show(first), { class: "headline", disabled: !first, title: first ? "show the evidence" : undefined }),
    el("p", { class: "advice" }, sentence(data.advice)),
    el("p", { class: "evidence" }, data.evidence.map((e) => button([el("span", { class: "where" }, NAMES[e.section] || e.section), ` ${e.text}`], () => show(e), { class: "link" }))));
}

function summary(host, show) {
  const top = el("div", { class: "top" });
  const figures = el("div", {});
  const list = el("ol", { class: "findings", "aria-label": "Findings, those with the largest gain first" });
  const missing = el("p", { class: "missing" });
  const heading = el("h2", { id: "h-findings" }, "What to change");
  add(host, [top, missing, figures, el("section", { class: "todo", "aria-labelledby": "h-findings" }, heading, list)]);
  let told = "";
  return {
    fill(data) {
      const now = JSON.stringify([data.run, data.verdict, data.findings, data.problems, data.steady, data.throughput]);
      if (now === told) return;
      told = now;
      put(top, header(data.run), verdict(data.verdict));
      put(missing, data.problems.length ? button(`${plural(data.problems.length, "thing")} missing or doubtful in this report`, () => show({ section: "problems", rows: [], ranks: [] }), { class: "link" }) : null);
      missing.hidden = !data.problems.length;
      const exposed = sum(data.breakdown.filter((b) => b.kind === "exposed").map((b) => b.share));
      const pace = data.throughput;
      put(figures, facts([
        ["a step takes", data.steady && seconds(data.steady.step_s), "mean over steady steps of the slowest rank's"],
        ["middle step", data.steady && seconds(data.steady.step_s_p50), "median"],
        ["one in ten above", data.steady && seconds(data.steady.step_s_p90)],
        ["samples per second", number(pace.samples_per_s)],
        ["of one process × ranks", known(pace.ratio) ? (pace.one_process_from === "estimated" ? "≤ " : "") + share(pace.ratio) : null,
          pace.one_process_from === "estimated" ? "estimated from what the ranks work; a run of one process would measure it" : "samples per second, obtained over expected"],
        ["exposed communication", data.breakdown.length ? share(exposed) : null, "time in which ranks could do nothing but wait"],
        ["steps", count(data.run.steps)],
      ]));
      const focus = document.activeElement && list.contains(document.activeElement) ? [...list.querySelectorAll("button")].indexOf(document.activeElement) : -1;
      put(list, data.findings.map((f, i) => finding(f, i + 1, show)));
      if (focus >= 0) list.querySelectorAll("button")[focus]?.focus();
      heading.parentNode.hidden = !data.findings.length;
    },
  };
}
