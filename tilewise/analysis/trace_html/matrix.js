// The whole matrix with its tiles, the tile on the chip as a table, and the timeline.

const LAYERS = {
  forward: {
    scores: { text: "scores", kind: "signed", tensor: "scores", say: "score of a pair, after terms and mask" },
    p: { text: "final weights", kind: "weight", tensor: "p", say: "weight p = exp(score − lse), after the last key" },
  },
  backward: {
    ds: { text: "ds", kind: "signed", tensor: "ds", say: trace.words.scores === "none" ? "ds = p (dp − delta)" : "ds = p (dp − delta), times the score terms' slope" },
    p: { text: "p", kind: "weight", tensor: "p", say: "p = exp(score − lse), computed again" },
    dp: { text: "dp", kind: "signed", tensor: "dp", say: "dp = do · v" },
    scores: { text: "scores", kind: "signed", tensor: "scores", say: "score of a pair, computed again" },
  },
};

function layerOf(name) {
  const found = LAYERS[view.pass][name];
  return { ...found, shade: scale(found.kind, largest(whole[found.tensor])) };
}

function isHidden(row, key) {
  return at(whole.scores, row, key) === -Infinity;
}

// Tile (i, j) -> number of the step that visits it.
function visits() {
  const found = new Map();
  run().steps.forEach((s, n) => { if (s[0] === "tile") found.set(`${s[1]},${s[2]}`, n); });
  return found;
}

const MARGIN = 34; // room for the labels of rows and keys

function mapSize() {
  const canvas = document.getElementById("map");
  const width = canvas.clientWidth || 480;
  const side = Math.min((width - MARGIN) / numKeys, Math.max((560 - MARGIN) / numQueries, (width - MARGIN) / numKeys * 0.4));
  return { canvas, width, side, height: MARGIN + side * numQueries + 2 };
}

function drawMap() {
  const { canvas, width, side, height } = mapSize();
  canvas.style.height = `${height}px`;
  const context = open2d(canvas, width, height), c = colours(), rec = recording();
  const layer = layerOf(view.layers[view.pass].map), when = visits(), here = step();
  rec.classes.forEach((line, i) => line.forEach((kind, j) => {
    const [r0, r1] = rowsOf(i), [k0, k1] = keysOf(j);
    const box = [MARGIN + k0 * side, MARGIN + r0 * side, (k1 - k0) * side, (r1 - r0) * side];
    const turn = when.get(`${i},${j}`);
    const current = here.kind === "tile" && here.i === i && here.j === j;
    const shown = view.everything || (turn !== undefined && turn <= view.step);
    context.fillStyle = paint(c.hidden);
    context.fillRect(...box);
    if (kind === EMPTY && !view.everything) hatch(context, ...box);
    else if (shown) drawCells(context, layer, [r0, r1, k0, k1], side, current || view.everything ? 1 : 0.38);
    else tilePattern(context, kind, box);
    context.strokeStyle = paint(c.line);
    context.lineWidth = 1;
    context.strokeRect(...box);
  }));
  drawMarks(context, here, side);
  drawLabels(context, side);
  const [empty, partial, full] = [EMPTY, PARTIAL, FULL].map((kind) => rec.classes.flat().filter((x) => x === kind).length);
  canvas.setAttribute("aria-label",
    `Matrix of ${numQueries} queries by ${numKeys} keys in ${rec.classes.length} by ${rec.classes[0].length} tiles: `
    + `${full} full, ${partial} partial, ${empty} empty and skipped.`);
  legend(document.getElementById("map-legend"), layer.shade, layer.say);
  drawKinds(full, partial, empty);
}

function drawCells(context, layer, [r0, r1, k0, k1], side, strength) {
  const c = colours();
  for (let row = r0; row < r1; row++) {
    for (let key = k0; key < k1; key++) {
      const box = [MARGIN + key * side, MARGIN + row * side, side, side];
      if (isHidden(row, key)) {
        context.fillStyle = paint(c.hidden);
        context.fillRect(...box);
        hatch(context, ...box, Math.max(4, side / 2));
      } else {
        context.fillStyle = paint(mix(c.panel, layer.shade.of(at(whole[layer.tensor], row, key)), strength));
        context.fillRect(box[0], box[1], side + 0.4, side + 0.4);
      }
    }
  }
}

function tilePattern(context, kind, box) {
  const c = colours();
  if (kind === EMPTY) { hatch(context, ...box); return; }
  context.fillStyle = paint(c.panel);
  context.fillRect(...box);
  if (kind === PARTIAL) dots(context, ...box);
}

function drawMarks(context, here, side) {
  const c = colours();
  const [r0, r1] = rowsOf(here.i), [k0, k1] = keysOf(here.j);
  context.lineWidth = 3;
  context.strokeStyle = paint(c.accent);
  if (here.kind === "tile") context.strokeRect(MARGIN + k0 * side, MARGIN + r0 * side, (k1 - k0) * side, (r1 - r0) * side);
  else context.strokeRect(MARGIN + 1, MARGIN + r0 * side, numKeys * side - 2, (r1 - r0) * side);
  context.fillStyle = paint(c.accent);
  context.fillRect(MARGIN - 5, MARGIN + r0 * side, 3, (r1 - r0) * side);
  if (here.kind === "tile") context.fillRect(MARGIN + k0 * side, MARGIN - 5, (k1 - k0) * side, 3);
  context.strokeStyle = paint(c.ink);
  context.lineWidth = 1.5;
  context.strokeRect(MARGIN + k0 * side - 1, MARGIN + view.row * side, (k1 - k0) * side + 2, side);
}

function drawLabels(context, side) {
  context.fillStyle = css("--quiet");
  context.font = "11px system-ui, 'DejaVu Sans', sans-serif";
  context.textAlign = "right";
  context.textBaseline = "middle";
  const every = (block) => Math.max(1, Math.ceil(20 / (block * side)));
  recording().classes.forEach((_, i) => {
    const [r0, r1] = rowsOf(i);
    if (i % every(view.block_q) === 0) context.fillText(String(r0), MARGIN - 9, MARGIN + r0 * side + Math.min(7, (r1 - r0) * side / 2));
  });
  context.textAlign = "left";
  recording().classes[0].forEach((_, j) => {
    if (j % every(view.block_k) === 0) context.fillText(String(keysOf(j)[0]), MARGIN + keysOf(j)[0] * side, MARGIN - 14);
  });
  context.textAlign = "right";
  context.fillText("keys →", MARGIN + numKeys * side, 7);
  context.textAlign = "left";
  context.fillText("queries ↓", 0, 7);
}

function drawKinds(full, partial, empty) {
  const entries = [
    [FULL, `full: every pair is visible, no mask work (${full})`],
    [PARTIAL, `partial: the mask is applied (${partial})`],
    [EMPTY, `empty: skipped, nothing is read (${empty})`],
  ];
  document.getElementById("kinds").replaceChildren(...entries.map(([kind, text]) => {
    const canvas = node("canvas");
    canvas.setAttribute("aria-hidden", "true");
    const context = open2d(canvas, 18, 18);
    context.fillStyle = paint(colours().hidden);
    context.fillRect(0, 0, 18, 18);
    tilePattern(context, kind, [0, 0, 18, 18]);
    return node("li", {}, [canvas, text]);
  }));
}

// The pair under a point of the canvas, or null.
function pairAt(event) {
  const { canvas, side } = mapSize(), box = canvas.getBoundingClientRect();
  const key = Math.floor((event.clientX - box.left - MARGIN) / side);
  const row = Math.floor((event.clientY - box.top - MARGIN) / side);
  return row >= 0 && row < numQueries && key >= 0 && key < numKeys ? { row, key } : null;
}

// ---- the tile as numbers ------------------------------------------------------------------------------------

function tileValue(row, key, name, after) {
  if (view.pass === "forward" && name === "weights") return round(Math.exp(round(at(whole.scores, row, key) - after(row).m)));
  return at(whole[LAYERS[view.pass][name].tensor], row, key);
}

// A hidden pair: its score is -inf, its weight and its gradients are 0.
function hiddenCell(name, chosen) {
  const td = cell(name === "scores" ? -Infinity : 0, { className: `hide ${chosen}` });
  td.setAttribute("aria-label", "hidden by the mask");
  td.title = "hidden by the mask";
  return td;
}

function numberCell(x, shade, className) {
  return cell(x, { text: short(x), shade, className });
}

function table(corner, names, chosenName, first, line) {
  const head = node("tr", {}, [node("th", { scope: "col", textContent: corner })]);
  names.forEach((name) => head.append(node("th", { scope: "col", textContent: String(name), className: name === chosenName ? "chosen" : "" })));
  const body = node("tbody");
  for (let row = first[0]; row < first[1]; row++) {
    const tr = node("tr", { className: row === view.row ? "chosen" : "" }, [node("th", { scope: "row", textContent: String(row) }), ...line(row)]);
    tr.dataset.row = String(row);
    body.append(tr);
  }
  return node("table", { className: "cells" }, [node("thead", {}, [head]), body]);
}

function drawTile() {
  const here = step(), target = document.getElementById("tile"), shownAs = document.getElementById("tile-legend");
  const title = document.getElementById("tile-title"), picker = document.getElementById("tile-layer").parentElement;
  title.textContent = here.kind === "finish" ? "The answer of these queries" : "The tile on the chip";
  picker.hidden = here.kind !== "tile";
  if (here.kind === "delta") {
    shownAs.replaceChildren();
    target.replaceChildren(node("p", { className: "quiet", textContent: "No tile yet: delta is one number for each query." }));
    return;
  }
  if (here.kind === "finish") drawAnswer(here, target, shownAs);
  else drawPairs(here, target, shownAs);
  target.style.minHeight = `${target.offsetHeight}px`; // the page does not jump at the next step
}

function drawAnswer(here, target, shownAs) {
  const out = recording().out, shade = scale("signed", largest(out));
  const line = (row) => Array.from(vector(out, row), (x) => numberCell(x, shade, ""));
  const dimensions = Array.from({ length: headDimV }, (_, d) => d);
  target.replaceChildren(table("query ↓ dim →", dimensions, -1, rowsOf(here.i), line));
  legend(shownAs, shade, "out = acc / l");
}

function drawPairs(here, target, shownAs) {
  const [k0, k1] = keysOf(here.j), name = view.layers[view.pass].tile;
  const weights = view.pass === "forward" && name === "weights";
  const shade = weights ? scale("weight", 1) : layerOf(name).shade;
  const keys = Array.from({ length: k1 - k0 }, (_, n) => k0 + n);
  const pair = (row, key) => {
    const chosen = row === view.row && key === view.key ? "chosen" : "";
    const td = isHidden(row, key) ? hiddenCell(name, chosen)
      : numberCell(tileValue(row, key, name, (r) => stateAfter(here.j, r)), shade, chosen);
    td.dataset.key = String(key);
    return td;
  };
  target.replaceChildren(table("query ↓ key →", keys, view.key, rowsOf(here.i), (row) => keys.map((key) => pair(row, key))));
  legend(shownAs, shade, weights ? "weight p = exp(score − m), m the largest score that the row has seen" : layerOf(name).say);
}

// ---- the timeline -------------------------------------------------------------------------------------------

function drawTimeline() {
  const canvas = document.getElementById("timeline"), width = canvas.clientWidth || 400, c = colours();
  const context = open2d(canvas, width, 14), steps = run().steps, slot = width / steps.length;
  const kinds = recording().classes;
  steps.forEach(([kind, i, j], n) => {
    const full = kind === "tile" && kinds[i][j] === FULL;
    context.fillStyle = paint(kind !== "tile" ? c.done : full ? c.accent : mix(c.panel, c.accent, 0.5));
    context.globalAlpha = n <= view.step ? 1 : 0.35;
    context.fillRect(n * slot, kind === "tile" ? 3 : 0, Math.max(slot - (slot > 4 ? 1 : 0), 0.8), kind === "tile" ? 8 : 14);
  });
  context.globalAlpha = 1;
  context.fillStyle = paint(c.ink);
  context.fillRect(view.step * slot, 12, slot, 2);
}
