// Steps, keys, playback, and the drawing of the whole page.

const byId = (id) => document.getElementById(id);
let timer = null;

function fill(select, options, chosen) {
  select.replaceChildren(...options.map(([value, text]) => node("option", { value, textContent: text, selected: String(value) === String(chosen) })));
}

// Whose order a loop is: forward the two papers differ, backward both have the keys outside.
const ORDERS = {
  forward: { "queries outer": "FlashAttention-2", "keys outer": "FlashAttention-1" },
  backward: { "queries outer": "dq stays on the chip", "keys outer": "FlashAttention-1 and -2" },
};

function fillLayers() {
  const layers = LAYERS[view.pass], names = Object.keys(layers), chosen = view.layers[view.pass];
  const tile = view.pass === "forward" ? ["scores", "weights"] : names;
  fill(byId("loop"), trace.loops.map((name) => [name, `${name} (${ORDERS[view.pass][name]})`]), view.loop);
  fill(byId("layer"), names.map((name) => [name, layers[name].text]), chosen.map);
  fill(byId("tile-layer"), tile.map((name) => [name, name === "weights" ? "weights p" : layers[name].text]), chosen.tile);
}

// The chosen query and key stay inside the tile on show.
function keepChoice() {
  const here = step(), [r0, r1] = rowsOf(here.i), [k0, k1] = keysOf(here.j);
  if (view.row < r0 || view.row >= r1) view.row = here.kind === "delta" ? view.row : r0;
  if (view.key < k0 || view.key >= k1) view.key = k0;
  const numbers = (first, end) => Array.from({ length: end - first }, (_, n) => [first + n, String(first + n)]);
  fill(byId("row"), numbers(r0, r1), view.row);
  fill(byId("key"), numbers(k0, k1), view.key);
  byId("key").parentElement.hidden = view.pass === "forward" || here.kind === "delta";
}

function drawBytes() {
  const here = step(), steps = run().steps, end = steps[steps.length - 1];
  const top = Math.max(end[4], end[5]);
  const meter = (name, text, value, final, className) => {
    const fillBar = node("div", { className: "fill" });
    fillBar.style.width = `${100 * value / top}%`;
    const number = node("span", { textContent: `${bytesText(value)} of ${bytesText(final)}` });
    number.dataset.value = String(value);
    number.dataset.name = name;
    return node("div", { className: `meter ${className}` }, [
      node("div", { className: "label" }, [span(text), number]), node("div", { className: "track" }, [fillBar]),
    ]);
  };
  const totals = new Map();
  steps.slice(0, view.step + 1).forEach(([, , , moves], n) => moves.forEach(([name, size]) => {
    const entry = totals.get(name) ?? { now: 0, read: 0, written: 0 };
    if (n === view.step) entry.now += Math.abs(size);
    entry[size > 0 ? "read" : "written"] += Math.abs(size);
    totals.set(name, entry);
  }));
  const body = node("tbody", {}, [...totals].map(([name, e]) => node("tr", {}, [
    node("th", { scope: "row", textContent: name }), ...[e.now, e.read, e.written].map((x) => cell(x, { text: x ? bytesText(x) : "·" })),
  ])));
  byId("bytes").replaceChildren(
    meter("tiled", `Tiled, ${view.loop}`, here.tiled, end[4], ""),
    meter("ordinary", "Ordinary attention, equally far", here.ordinary, end[5], "other"),
    node("div", { className: "scroll" }, [node("table", {}, [headers(["tensor", "this step", "read so far", "written so far"]), body])]),
    node("p", { className: "quiet", textContent: view.pass === "forward"
      ? "Ordinary attention passes over the whole matrix four times: scores written, read, weights written, read. Hidden pairs are stored like all others."
      : "Ordinary attention kept p and passes over the whole matrix seven times: p read twice, dp written and read, ds written and read twice." }),
  );
}

function draw() {
  const here = step(), count = run().steps.length, backward = view.pass === "backward";
  keepChoice();
  byId("slider").max = count - 1;
  byId("slider").value = view.step;
  byId("counter").textContent = `Step ${view.step + 1} of ${count}`;
  const sentence = backward ? backwardSentence(here) : forwardSentence(here);
  byId("slider").setAttribute("aria-valuetext", `Step ${view.step + 1} of ${count}. ${sentence}`);
  byId("sentence").textContent = sentence;
  byId("aside").textContent = movesText(here);
  // Not `disabled`: a button that is disabled while it has the focus loses it.
  ["first", "back"].forEach((id) => byId(id).setAttribute("aria-disabled", view.step === 0));
  ["last", "forth"].forEach((id) => byId(id).setAttribute("aria-disabled", view.step === count - 1));
  drawTimeline();
  drawMap();
  drawTile();
  if (backward) { backwardTable(); backwardPair(); } else { forwardTable(); forwardRow(); }
  drawBytes();
}

function go(n) {
  view.step = Math.max(0, Math.min(n, run().steps.length - 1));
  draw();
}

function pause() {
  clearInterval(timer);
  timer = null;
  byId("play").textContent = "Play";
  byId("sentence").setAttribute("aria-live", "polite");
}

function play() {
  if (timer) { pause(); return; }
  if (view.step === run().steps.length - 1) go(0);
  byId("play").textContent = "Pause";
  byId("sentence").setAttribute("aria-live", "off"); // a moving run would drown the reader
  timer = setInterval(() => {
    if (view.step >= run().steps.length - 1) pause();
    else go(view.step + 1);
  }, 1000 / Number(byId("speed").value));
}

// A change of tiles, loop or pass keeps the place: the step of the same kind with the same query and key, or query.
function change(update) {
  const here = step(), row = rowsOf(here.i)[0], key = keysOf(here.j)[0];
  update();
  fillLayers();
  const inside = ([first, end], n) => first <= n && n < end;
  const steps = run().steps;
  const same = (kind, i, j) => kind === here.kind && inside(rowsOf(i), row) && inside(keysOf(j), key);
  const alike = [
    ([kind, i, j]) => same(kind, i, j),
    ([kind, i]) => kind === here.kind && inside(rowsOf(i), row),
    ([kind, i]) => kind === "tile" && inside(rowsOf(i), row),
  ];
  go(Math.max(0, ...alike.map((test) => steps.findIndex(test)).filter((n) => n >= 0).slice(0, 1)));
}

function chooseRow(row) {
  const [r0, r1] = rowsOf(step().i);
  view.row = Math.max(r0, Math.min(row, r1 - 1));
  draw();
}

const KEYS = {
  ArrowRight: () => go(view.step + 1), ArrowLeft: () => go(view.step - 1),
  Home: () => go(0), End: () => go(run().steps.length - 1),
  PageDown: () => go(view.step + 10), PageUp: () => go(view.step - 10),
  ArrowDown: () => chooseRow(view.row + 1), ArrowUp: () => chooseRow(view.row - 1),
  " ": play,
};

// A control keeps the keys that it answers itself.
function keptBy(element, key) {
  if (!element) return false;
  if (element.tagName === "BUTTON" || element.tagName === "SUMMARY" || element.type === "checkbox") return key === " ";
  if (element.type === "radio") return key === " " || key.startsWith("Arrow");
  return true; // lists and the slider
}

function onKey(event) {
  const kept = keptBy(event.target.closest("select, input, summary, button"), event.key);
  if (event.altKey || event.ctrlKey || event.metaKey || kept || !KEYS[event.key]) return;
  event.preventDefault();
  KEYS[event.key]();
}

const THEMES = { system: "as the system has them", light: "light", dark: "dark" };
let theme = "system";

function applyTheme() {
  const dark = theme === "dark" || (theme === "system" && matchMedia("(prefers-color-scheme: dark)").matches);
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  byId("theme").textContent = `Colours: ${theme}`;
  byId("theme").setAttribute("aria-label", `Colours: ${THEMES[theme]}`);
  palette = null;
}

function connect() {
  const steps = { first: () => go(0), back: () => go(view.step - 1), forth: () => go(view.step + 1), last: () => go(Infinity), play };
  Object.entries(steps).forEach(([id, action]) => byId(id).addEventListener("click", action));
  byId("slider").addEventListener("input", (event) => go(Number(event.target.value)));
  byId("timeline").addEventListener("click", (event) => go(Math.floor(event.offsetX / event.target.clientWidth * run().steps.length)));
  document.querySelectorAll("input[name=pass]").forEach((input) => input.addEventListener("change", () => change(() => { view.pass = input.value; })));
  ["block_q", "block_k"].forEach((id) => byId(id).addEventListener("change", (event) => change(() => { view[id] = Number(event.target.value); })));
  byId("loop").addEventListener("change", (event) => change(() => { view.loop = event.target.value; }));
  byId("speed").addEventListener("change", () => { if (timer) { pause(); play(); } });
  byId("layer").addEventListener("change", (event) => { view.layers[view.pass].map = event.target.value; draw(); });
  byId("tile-layer").addEventListener("change", (event) => { view.layers[view.pass].tile = event.target.value; draw(); });
  byId("everything").addEventListener("change", (event) => { view.everything = event.target.checked; draw(); });
  byId("row").addEventListener("change", (event) => chooseRow(Number(event.target.value)));
  byId("key").addEventListener("change", (event) => { view.key = Number(event.target.value); draw(); });
  byId("map").addEventListener("click", (event) => {
    const pair = pairAt(event);
    const found = pair && visits().get(`${Math.floor(pair.row / view.block_q)},${Math.floor(pair.key / view.block_k)}`);
    if (found !== undefined && found !== null) { Object.assign(view, pair); go(found); }
  });
  ["tile", "state"].forEach((id) => byId(id).addEventListener("click", (event) => {
    const row = event.target.closest("[data-row]"), key = event.target.closest("[data-key]");
    if (key) view.key = Number(key.dataset.key);
    if (row) chooseRow(Number(row.dataset.row));
    else if (key) draw();
  }));
  byId("theme").addEventListener("click", () => {
    const names = Object.keys(THEMES);
    theme = names[(names.indexOf(theme) + 1) % names.length];
    applyTheme();
    draw();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { applyTheme(); draw(); });
  window.addEventListener("resize", draw);
  document.addEventListener("keydown", onKey);
}

const HELP = `
<p>Attention of a query over its keys is a sum that can be built tile by tile. After each tile three things survive: the
largest score <i>m</i>, the sum <i>l</i> of exp(score − m), and <i>acc</i>, the same sum weighted with the values. A tile with
a larger score moves <i>m</i>; <i>l</i> and <i>acc</i> are then rescaled by <i>α</i> = exp(m before − m after). At any moment
acc / l is exact attention over the keys seen so far.</p>
<p>The loop order changes no number of a row, only what has to move: with queries outside (FlashAttention-2) the state stays on
the chip; with keys outside (FlashAttention-1) it travels at every tile. Tiles that the mask empties are not visited.</p>
<p>All numbers come from one run of the library: <code>OnlineSoftmaxState</code> over the tiles of <code>classify_tiles</code>,
recorded bit by bit for each choice of tile sizes. Bytes count what passes between memory and chip, without caches.
In the backward pass <i>delta</i> is Σ p dp, as the reference computes it; kernels read it off as do · out, which differs
by rounding alone, and count its bytes so.</p>
<ul>
<li><kbd>←</kbd> <kbd>→</kbd> one step, <kbd>Page Up</kbd> <kbd>Page Down</kbd> ten, <kbd>Home</kbd> <kbd>End</kbd> first and last</li>
<li><kbd>space</kbd> play or pause; <kbd>↑</kbd> <kbd>↓</kbd> another query of the tile</li>
<li>A click on the matrix goes to that tile; a click on a number chooses its query and key</li>
</ul>`;

function start() {
  applyTheme();
  byId("title").textContent = trace.title === trace.problem ? "Tilewise trace" : trace.title;
  const terms = trace.words.scores === "none" ? "" : `, score terms ${trace.words.scores}`;
  byId("problem").textContent = `${trace.problem}${terms}${whole.sink ? ", a sink" : ""}, scale ${fmt(trace.scale)}`;
  byId("help").innerHTML = HELP;
  ["block_q", "block_k"].forEach((id) => {
    const sizes = [...new Set(trace.recordings.map((r) => r[id]))].sort((a, b) => a - b);
    fill(byId(id), sizes.map((n) => [n, String(n)]), view[id]);
  });
  fillLayers();
  connect();
  draw();
}

start();
