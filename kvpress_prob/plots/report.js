"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const { presses, tables, examples, rows, dense, all } = data;
  const legend = [...document.querySelectorAll(".legend button")];
  const colour = presses.map((_, i) => legend[i].querySelector("line").getAttribute("stroke"));

  function element(tag, attributes = {}, ...children) {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    node.append(...children);
    return node;
  }
  const number = (value, digits = 1) => (value === null || value === undefined ? "–" : value.toFixed(digits));
  const unique = (values) => [...new Set(values)];
  const choice = (name) => document.querySelector(`[data-choice="${name}"]`);

  // Legend: point to highlight a press and its interval, click to hide it.
  const hidden = new Set();
  function paint(highlighted = null) {
    for (let i = 0; i < presses.length; i++) {
      const faint = highlighted !== null && highlighted !== i;
      for (const node of document.querySelectorAll(`.series-${i}`)) node.style.opacity = hidden.has(i) ? 0 : faint ? 0.12 : 1;
      for (const node of document.querySelectorAll(`.band-${i}`)) node.style.opacity = !hidden.has(i) && highlighted === i ? 1 : 0;
    }
  }
  legend.forEach((button, i) => {
    for (const event of ["pointerenter", "focus"]) button.addEventListener(event, () => paint(i));
    for (const event of ["pointerleave", "blur"]) button.addEventListener(event, () => paint());
    button.addEventListener("click", () => {
      hidden.has(i) ? hidden.delete(i) : hidden.add(i);
      button.setAttribute("aria-pressed", String(!hidden.has(i)));
      paint(hidden.has(i) ? null : i);
    });
  });

  // Tables. A cell is {text, note, value, best, tone}; value sorts.
  function draw(name, headings, body) {
    const target = document.querySelector(`[data-table="${name}"]`);
    target.replaceChildren();
    if (!body.length) return target.append(element("p", { class: "empty" }, "Not measured in this run."));
    const tbody = element("tbody");
    const fill = (ordered) => tbody.replaceChildren(...ordered.map((cells) => element("tr", {}, ...cells.map((cell) => {
      const td = element("td", { class: [cell.best ? "best" : "", cell.tone || ""].join(" ").trim() }, cell.text);
      if (cell.note) td.append(element("small", {}, cell.note));
      return td;
    }))));
    const heads = headings.map((heading, column) => {
      const button = element("button", { type: "button" }, heading);
      const th = element("th", { scope: "col", "aria-sort": "none" }, button);
      button.addEventListener("click", () => {
        const text = typeof body[0][column].value === "string";
        const down = th.getAttribute("aria-sort") === "none" ? !text : th.getAttribute("aria-sort") === "ascending";
        for (const other of heads) other.setAttribute("aria-sort", "none");
        th.setAttribute("aria-sort", down ? "descending" : "ascending");
        const rank = (cells) => (cells[column].value === null ? -Infinity : cells[column].value);
        const order = (a, b) => (text ? String(rank(a)).localeCompare(rank(b)) : rank(a) - rank(b));
        fill([...body].sort((a, b) => (down ? order(b, a) : order(a, b))));
      });
      return th;
    });
    fill(body);
    target.append(element("table", {}, element("thead", {}, element("tr", {}, ...heads)), tbody));
  }
  const label = (press) => ({ text: press, value: press });
  const figure = (value, digits = 1, note = "") => ({ text: number(value, digits), value, note });
  const withInterval = (row, key, scale = 1, digits = 1) => row
    ? figure(row[key] * scale, digits, row.low === null ? "" : `[${number(row.low * scale, digits)}, ${number(row.high * scale, digits)}]`)
    : { text: "–", value: null };
  function markBest(body) {
    for (let column = 1; column < (body[0] || []).length; column++) {
      const top = Math.max(...body.filter((cells) => cells[0].value !== dense).map((cells) => cells[column].value ?? -Infinity));
      for (const cells of body) cells[column].best = cells[0].value !== dense && cells[column].value === top;
    }
    return body;
  }
  // One row a press, one column for each value of a field.
  function pivot(table, field, columns, cell) {
    const found = new Map(table.map((row) => [`${row.press}|${row[field]}`, row]));
    const seen = new Set(table.map((row) => row.press));
    return presses.filter((press) => seen.has(press)).map((press) => [label(press), ...columns.map((column) => cell(found.get(`${press}|${column}`)))]);
  }

  const totals = tables.scores.filter((row) => row.task === all);
  const ratios = unique(tables.budgets.map((row) => row.ratio)).filter((ratio) => ratio > 0).sort((a, b) => a - b);
  // The dense cache has one score, whatever the ratio.
  const spread = (table) => table.flatMap((row) => (row.press === dense ? ratios.map((ratio) => ({ ...row, ratio })) : [row]));
  const byRatio = ratios.map((ratio) => `r = ${ratio}`);
  draw("scores", ["press", ...byRatio], markBest(pivot(spread(totals), "ratio", ratios, (row) => withInterval(row, "score"))));
  draw("wins", ["press", ...byRatio], markBest(pivot(tables.wins, "ratio", ratios, (row) => withInterval(row, "win", 100))));
  draw("budgets", ["press", "target", "achieved", "± std", "bytes (MB)", "of dense (%)", "holds", "effective (%)"], tables.budgets.map((row) => [
    label(row.press), figure(row.ratio, 2), figure(row.achieved, 4), figure(row.achieved_std, 4), figure(row.bytes / 1e6, 2), figure(row.bytes_fraction * 100),
    row.masked ? { text: "everything (masks)", value: "masks" } : { text: "what it kept", value: "evicts" }, figure(row.effective === null ? null : row.effective * 100),
  ]));
  draw("errors", ["press", "ratio", "relative error", "absolute error, first token"], tables.errors.map((row) => [
    label(row.press), figure(row.ratio, 2), withInterval(row, "error", 1, 4), figure(row.error_abs, 5),
  ]));
  draw("costs", ["press", "scoring", "eviction", "per decoded token"], tables.costs.map((row) => [
    label(row.press), figure(row.score_ms), figure(row.compress_ms), figure(row.decode_ms_per_token),
  ]));

  function options(name, values, show, change) {
    const select = choice(name);
    select.replaceChildren(...values.map((value) => element("option", { value }, show(value))));
    select.addEventListener("change", change);
    return select;
  }
  const middle = ratios[Math.floor(ratios.length / 2)];
  const tasks = unique(tables.scores.map((row) => row.task)).filter((task) => task !== all);
  function drawTasks() {
    const ratio = Number(choice("taskRatio").value);
    const part = spread(tables.scores).filter((row) => row.ratio === ratio && row.task !== all);
    draw("tasks", ["press", ...tasks], markBest(pivot(part, "task", tasks, (row) => withInterval(row, "score"))));
  }
  function drawDifferences() {
    const other = choice("other").value;
    const part = tables.differences.filter((row) => row.other === other && row.ratio === Number(choice("ratio").value));
    draw("differences", ["press", "difference", "interval", "reading"], part.map((row) => {
      const [reading, tone] = row.low === null ? ["too few examples", ""] : row.low > 0 ? ["higher", "good"] : row.high < 0 ? ["lower", "bad"] : ["cannot be told apart", ""];
      return [label(row.press), figure(row.difference), { text: `[${number(row.low)}, ${number(row.high)}]`, value: row.low }, { text: reading, value: reading, tone }];
    }));
  }
  options("taskRatio", ratios, String, drawTasks).value = String(middle);
  options("ratio", ratios, String, drawDifferences).value = String(middle);
  options("other", unique(tables.differences.map((row) => row.other)), String, drawDifferences);
  drawTasks();
  drawDifferences();

  // Examples.
  const answered = unique(rows.map((row) => row[0]));
  function found(text, answers) {
    // The prediction with every accepted answer in it marked.
    const escaped = answers.filter((answer) => answer).map((answer) => answer.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"));
    if (!escaped.length) return [text];
    const pattern = new RegExp(`(${escaped.join("|")})`, "gi");
    return text.split(pattern).map((part, i) => (i % 2 ? element("mark", {}, part) : part));
  }
  function drawExample() {
    const target = document.getElementById("example");
    const index = Number(choice("example").value);
    const example = examples[index];
    if (!example) return target.replaceChildren(element("p", { class: "empty" }, "No answers were decoded in this run."));
    const ratio = Number(choice("exampleRatio").value);
    const part = rows.filter((row) => row[0] === index && (row[2] === ratio || presses[row[1]] === dense));
    const line = (title, text) => element("p", {}, element("b", {}, title), text);
    target.replaceChildren(
      element("div", { class: "question" }, line("question", example.question || "(inside the context)"), line("answer begins", example.prefix || "–"), line("accepted", example.answers.join(" · "))),
      element("div", { class: "answers" }, ...part.map(([, press, , seed, score, prediction, bytes, tokens]) => element("div", { class: "answer", style: `--series: ${colour[press]}` },
        element("div", { class: "who" }, presses[press], element("small", {}, `${seed === null ? "" : `seed ${seed} · `}${number(bytes / 1e6)} MB · ${tokens} tokens`)),
        element("div", { class: `score ${score >= 99.95 ? "good" : score === 0 ? "bad" : ""}` }, number(score, 0)),
        element("div", { class: "text" }, ...found(prediction.trim(), example.answers))))),
    );
  }
  function fillExamples() {
    const task = choice("task").value;
    const inTask = answered.filter((index) => examples[index].task === task);
    choice("example").replaceChildren(...inTask.map((index) => element("option", { value: index }, examples[index].name)));
    drawExample();
  }
  options("task", unique(answered.map((index) => examples[index].task)), String, fillExamples);
  options("exampleRatio", ratios, String, drawExample).value = String(middle);
  choice("example").addEventListener("change", drawExample);
  for (const button of document.querySelectorAll("[data-step]")) {
    button.addEventListener("click", () => {
      const select = choice("example");
      select.selectedIndex = (select.selectedIndex + Number(button.dataset.step) + select.length) % select.length;
      drawExample();
    });
  }
  fillExamples();
})();
