// What the other files share: making nodes, writing numbers, colours, and the choices of the reader.
"use strict";

// Makes a node. What traces say only ever becomes text.
function el(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "style") for (const [k, v] of Object.entries(value)) node.style.setProperty(k, v);
    else if (name === "on") for (const [k, v] of Object.entries(value)) node.addEventListener(k, v);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  add(node, children);
  return node;
}

function add(node, children) {
  for (const child of [children].flat(Infinity)) {
    if (child === undefined || child === null || child === false) continue;
    node.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return node;
}

function put(node, ...children) {
  node.replaceChildren();
  return add(node, children);
}

const known = (value) => value !== null && value !== undefined && !Number.isNaN(value);
const sum = (values) => values.reduce((a, b) => a + (b || 0), 0);
const largest = (values) => values.reduce((a, b) => (known(b) && b > a ? b : a), -Infinity);
const plural = (n, one, many) => `${count(n)} ${n === 1 ? one : many || one + "s"}`;

function mean(values) {
  const found = values.filter(known);
  return found.length ? sum(found) / found.length : null;
}

// --- numbers: three digits and a unit ---------------------------------------------------------------

const digits = (x, n = 3) => {
  const size = Math.abs(x);
  if (size === 0) return "0";
  const whole = Math.floor(Math.log10(size)) + 1;
  return x.toLocaleString("en", { maximumFractionDigits: Math.max(0, n - Math.max(whole, 1)), minimumFractionDigits: size >= 1000 ? 0 : Math.min(8, Math.max(0, n - Math.max(whole, 1))) });
};

function scaled(x, units) {
  if (!known(x)) return "–";
  if (x === 0) return "0";
  const size = Math.abs(x);
  let found = units[0];
  for (const unit of units) if (size >= unit[0] * 0.9995) found = unit;
  return `${digits(x / found[0]).replace("-", "−")} ${found[1]}`;
}

const SECONDS = [[1e-9, "ns"], [1e-6, "µs"], [1e-3, "ms"], [1, "s"]];
const KI = 1024;
const BYTES = [[1, "B"], [KI, "KiB"], [KI ** 2, "MiB"], [KI ** 3, "GiB"], [KI ** 4, "TiB"]];
const RATES = [[1, "B/s"], [1e3, "kB/s"], [1e6, "MB/s"], [1e9, "GB/s"]];

const seconds = (x) => scaled(x, SECONDS);
const bytes = (x) => scaled(x, BYTES);
const rate = (x) => scaled(x, RATES);
const count = (x) => (known(x) ? Math.round(x).toLocaleString("en") : "–");
const number = (x) => (known(x) ? digits(x) : "–");
const share = (x) => (known(x) ? `${(x * 100).toFixed(Math.abs(x) >= 0.9995 ? 0 : x === 0 ? 0 : Math.abs(x) < 0.01 ? 2 : 1)} %` : "–");
const ratio = (x) => (known(x) ? `× ${digits(x)}` : "–");
// A number and its unit stay on one line.
const kept = (text) => String(text).replace(/(\d) (?=(%|s|ms|us|µs|ns|B|KiB|MiB|GiB|TiB)\b|%)/g, "$1\u00a0");
// A key of the plan, or a call, is written as it is.
const sentence = (text) => (text ? kept(/^\S*[._=(]\w/.test(text) ? text : text[0].toUpperCase() + text.slice(1)) : "");
const word = (x) => (known(x) && x !== "" ? String(x) : "–");

function duration(x) {
  if (!known(x)) return "–";
  if (x < 120) return seconds(x);
  const h = Math.floor(x / 3600), m = Math.floor((x % 3600) / 60), s = Math.floor(x % 60);
  return h ? `${h} h ${m} min` : `${m} min ${s} s`;
}

// Size of an operation: a power of two, or none.
const power = (b) => (b <= 0 ? "none" : scaled(2 ** (b - 1), BYTES).replace(/\.0+ /, " "));
const bucketOf = (size) => (size > 0 ? Math.floor(Math.log2(size)) + 1 : 0);

// --- colours: Okabe and Ito, which colour-blind people can tell ------------------------------------

const COLOURS = {
  orange: "#e69f00", sky: "#56b4e9", green: "#009e73", yellow: "#f0e442", blue: "#0072b2",
  vermilion: "#d55e00", purple: "#cc79a7", grey: "#8a8f98", pale: "#c3c8cf",
};
const PHASE_COLOURS = {
  load: "orange", augment: "yellow", forward: "sky", backward: "blue", reduce: "vermilion",
  update: "green", validate: "purple", checkpoint: "grey", other: "pale", work: "sky",
};
const TAG_COLOURS = {
  "parameters and gradients": "vermilion", "batch-norm statistics": "purple", "loss": "yellow",
  "halo exchange": "green", "pipeline activations": "blue", "tiles to batch": "orange",
  "checkpoint": "grey", "data": "sky", "control": "pale", "other": "pale",
};
const phaseColour = (phase) => COLOURS[PHASE_COLOURS[phase] || "grey"];
const tagColour = (tag) => COLOURS[TAG_COLOURS[tag] || "grey"];
const LINES = ["blue", "vermilion", "green", "purple", "orange", "sky", "grey", "yellow"].map((n) => COLOURS[n]);

const darkScheme = matchMedia("(prefers-color-scheme: dark)");
const calm = matchMedia("(prefers-reduced-motion: reduce)");
const ink = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// --- what the reader has chosen, kept while a live run goes on -----------------------------------------

const view = {
  rank: "all",
  watchers: new Set(),
  choose(rank) {
    this.rank = String(rank);
    for (const watcher of this.watchers) watcher();
  },
};

// --- sections ------------------------------------------------------------------------------------------

// A section is built once and filled whenever one of the parts of the document that it `needs` has changed.
class Section {
  constructor({ id, title, short, needs, about, build }) {
    this.id = id;
    this.short = short || title;
    this.needs = needs;
    this.title = title;
    this.heading = el("h2", { id: `h-${id}`, tabindex: "-1" }, title);
    this.body = el("div", { class: "body" });
    this.node = el("section", { id: `s-${id}`, "aria-labelledby": `h-${id}` },
      el("header", { class: "head" }, this.heading, about && el("p", { class: "about" }, about)), this.body);
    const made = build(this.body, this);
    this.fill = made.fill;
    this.focus = made.focus || (() => {});
  }

  visible(shown) {
    this.node.hidden = !shown;
  }

  // Scrolls here, lights up, and points at what `evidence` names.
  show(evidence) {
    this.node.hidden = false;
    if (evidence) this.focus(evidence);
    this.node.scrollIntoView({ behavior: calm.matches ? "auto" : "smooth", block: "start" });
    this.heading.focus({ preventScroll: true });
    this.node.classList.remove("lit");
    void this.node.offsetWidth;  // restarts the animation
    this.node.classList.add("lit");
    clearTimeout(this.dark);
    this.dark = setTimeout(() => this.node.classList.remove("lit"), 4000);
  }
}

function choice(label, change) {
  const select = el("select", { on: { change: () => change(select.value) } });
  const node = el("label", { class: "choice" }, el("span", {}, label), select);
  return {
    node,
    get value() { return select.value; },
    set value(v) { select.value = v; },
    // Replaces the options [value, text], keeps what is chosen if it is still there.
    set(options) {
      const before = select.value, told = JSON.stringify(options);
      if (select.dataset.told !== told) {
        select.dataset.told = told;
        put(select, options.map(([value, text]) => el("option", { value }, text)));
      }
      if (options.some(([value]) => value === before)) select.value = before;
    },
  };
}

function button(text, press, attributes) {
  return el("button", { type: "button", on: { click: press }, ...(attributes || {}) }, text);
}

// A bar of parts: [{name, value, colour, hatched, text}], on a common scale.
function bar(parts, whole) {
  return el("div", { class: "bar", "aria-hidden": "true" }, parts.filter((p) => p.value > 0).map((p) =>
    el("span", { class: p.hatched ? "part hatched" : "part", title: p.text || p.name,
      style: { width: `${Math.max(0, Math.min(100, (100 * p.value) / whole))}%`, "--colour": p.colour } })));
}

const swatch = (colour, hatched, kind) => el("span", { class: `swatch ${hatched ? "hatched" : ""} ${kind || ""}`, style: { "--colour": colour }, "aria-hidden": "true" });
