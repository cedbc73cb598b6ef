// Tables that sort by a click or a key, filter, and show the first rows of many.
"use strict";

// columns: {key, title, format, numeric, cell(row) -> node, value(row), help}; `pick(row)` makes rows clickable.
function table(host, { label, columns, limit = 40, sort, descending = true, pick, rowClass, empty = "Nothing was recorded." }) {
  const state = { rows: [], order: sort || null, descending, all: false, lit: new Set(), words: "" };
  const body = el("tbody", {});
  const heads = columns.map((column) => {
    const press = button(column.title, () => order(column), { title: column.help });
    return el("th", { scope: "col", class: column.numeric ? "n" : "" }, press);
  });
  const grid = el("table", {}, el("caption", { class: "hidden" }, label),
    el("thead", {}, el("tr", {}, heads)), body);
  const frame = el("div", { class: "frame", tabindex: "0", role: "region", "aria-label": label }, grid);
  const more = button("", () => { state.all = !state.all; draw(); }, { class: "more" });
  const foot = el("div", { class: "foot" }, more);
  add(host, [frame, foot]);

  const valueOf = (column, row) => (column.value ? column.value(row) : row[column.key]);

  function order(column) {
    if (state.order === column.key) state.descending = !state.descending;
    else [state.order, state.descending] = [column.key, Boolean(column.numeric)];
    draw();
  }

  // Words are looked for in columns of words; a number is that of the row.
  function fits(column, i, row, words) {
    const value = String(valueOf(column, row) ?? "").toLowerCase();
    return column.numeric ? i === 0 && value === words : value.includes(words);
  }

  function sorted() {
    const words = state.words.toLowerCase();
    const rows = words ? state.rows.filter((row) => columns.some((c, i) => fits(c, i, row, words))) : [...state.rows];
    const column = columns.find((c) => c.key === state.order);
    if (!column) return rows;
    const way = state.descending ? -1 : 1;
    return rows.sort((a, b) => {
      const [x, y] = [valueOf(column, a), valueOf(column, b)];
      if (!known(x) || !known(y)) return known(x) ? -1 : known(y) ? 1 : 0;  // unknown comes last
      return way * (typeof x === "string" ? x.localeCompare(String(y), "en", { numeric: true }) : x - y);
    });
  }

  function line(row) {
    const cells = columns.map((column, i) => {
      const shown = column.cell ? column.cell(row) : (column.format || word)(valueOf(column, row), row);
      const attributes = { class: column.numeric ? "n" : column.code ? "code" : "" };
      if (i === 0) return el("th", { scope: "row", ...attributes }, pick ? button(shown, (e) => { e.stopPropagation(); pick(row); }, { class: "link" }) : shown);
      return el("td", attributes, shown);
    });
    const classes = [state.lit.has(row.index) ? "lit" : "", rowClass ? rowClass(row) : "", pick ? "pick" : ""];
    return el("tr", { class: classes.join(" ").trim() || null, on: pick ? { click: () => pick(row) } : {} }, cells);
  }

  function draw() {
    columns.forEach((column, i) => {
      const on = state.order === column.key;
      heads[i].setAttribute("aria-sort", on ? (state.descending ? "descending" : "ascending") : "none");
    });
    const rows = sorted();
    const cut = state.all ? rows : rows.slice(0, limit);
    put(body, cut.length ? cut.map(line) : el("tr", {}, el("td", { colspan: columns.length, class: "none" }, state.words ? "Nothing matches." : empty)));
    more.hidden = rows.length <= limit;
    more.textContent = state.all ? `Show the first ${limit}` : `Show all ${count(rows.length)}`;
  }

  return {
    frame,
    set(rows) {
      state.rows = rows.map((row, index) => ({ index, ...row }));
      draw();
    },
    // Marks rows by their index and brings the first into sight.
    light(indices) {
      state.lit = new Set(indices);
      if (indices.length && sorted().findIndex((row) => state.lit.has(row.index)) >= limit) state.all = true;
      draw();
      const first = body.querySelector("tr.lit");
      if (first) frame.scrollTop = Math.max(0, first.offsetTop - 60);
    },
    filter(words) {
      state.words = words;
      draw();
    },
    redraw: draw,
  };
}

function filterBox(label, change) {
  const input = el("input", { type: "search", placeholder: "filter", "aria-label": label, autocomplete: "off", spellcheck: "false" });
  input.addEventListener("input", () => change(input.value.trim()));
  return input;
}
