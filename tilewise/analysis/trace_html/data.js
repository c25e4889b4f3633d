"use strict";
// The recorded run, and where the page stands in it. Nothing here draws.

const trace = JSON.parse(document.getElementById("trace").textContent);
const EMPTY = 0, PARTIAL = 1, FULL = 2;

// {type, shape, data} -> {shape, numbers}: the very bits that were computed.
function decode(array) {
  const bytes = Uint8Array.from(atob(array.data), (c) => c.charCodeAt(0));
  const numbers = array.type === "f8" ? new Float64Array(bytes.buffer) : new Float32Array(bytes.buffer);
  return { shape: array.shape, numbers };
}

function decodeAll(arrays) {
  return Object.fromEntries(Object.entries(arrays).map(([name, array]) => [name, decode(array)]));
}

function at(tensor, ...index) {
  let place = 0;
  index.forEach((n, d) => { place = place * tensor.shape[d] + n; });
  return tensor.numbers[place];
}

function vector(tensor, ...index) {
  const length = tensor.shape[tensor.shape.length - 1];
  let place = 0;
  index.forEach((n, d) => { place = place * tensor.shape[d] + n; });
  return tensor.numbers.subarray(place * length, (place + 1) * length);
}

const whole = decodeAll(trace.arrays);
const round = trace.arrays.q.type === "f8" ? (x) => x : Math.fround; // to the type of the run
const [numQueries, headDim] = whole.q.shape;
const [numKeys, headDimV] = whole.v.shape;

// What the reader has chosen.
const view = {
  pass: "forward", block_q: trace.block_q, block_k: trace.block_k, loop: trace.loops[0], step: 0,
  row: 0, key: 0, everything: false,
  layers: { forward: { map: "scores", tile: "scores" }, backward: { map: "ds", tile: "ds" } },
};

const decoded = new Map(); // recordings are read when they are first looked at
let current = null;

function recording() {
  if (current?.block_q === view.block_q && current.block_k === view.block_k) return current;
  const found = trace.recordings.find((r) => r.block_q === view.block_q && r.block_k === view.block_k);
  if (!decoded.has(found)) decoded.set(found, { ...found, ...decodeAll(found.arrays) });
  current = decoded.get(found);
  return current;
}

function run() {
  return recording().runs.find((r) => r.pass === view.pass && r.loop === view.loop);
}

function step(n = view.step) {
  const [kind, i, j, moves, tiled, ordinary] = run().steps[n];
  return { kind, i, j, moves, tiled, ordinary };
}

function rowsOf(i) {
  const first = Math.max(i, 0) * view.block_q;
  return [first, i < 0 ? numQueries : Math.min(first + view.block_q, numQueries)];
}

function keysOf(j) {
  const first = Math.max(j, 0) * view.block_k;
  return [first, j < 0 ? numKeys : Math.min(first + view.block_k, numKeys)];
}

// The state of a row after its column tile j; before the first tile it is empty: m = -inf, l = 0, acc = 0.
function stateAfter(j, row) {
  const rec = recording();
  if (j < 0) return { m: -Infinity, l: 0, acc: new Float32Array(headDimV) };
  return { m: at(rec.m, j, row), l: at(rec.l, j, row), acc: vector(rec.acc, j, row) };
}

// The answer if the loop stopped at a state: acc / l, 0 where no key was seen.
function answer(state) {
  return Array.from(state.acc, (x) => (state.l === 0 || state.m === -Infinity ? 0 : round(x / state.l)));
}

function distance(a, b) {
  let far = 0;
  for (let d = 0; d < a.length; d++) far = Math.max(far, Math.abs(round(a[d] - b[d])));
  return far;
}

// The part of the row's softmax sum that a state has seen; a sink belongs to what has not been seen.
function seen(state, row) {
  const lse = at(recording().lse, row);
  if (state.l === 0 || state.m === -Infinity) return lse === -Infinity ? 1 : 0;
  return Math.min(1, Math.exp(state.m + Math.log(state.l) - lse));
}

function gradientAfter(name, tile, index) {
  const tensor = recording()[name];
  return tile < 0 ? new Float32Array(tensor.shape[2]) : vector(tensor, tile, index);
}

function largest(tensor) {
  let top = 0;
  for (const x of tensor.numbers) if (Number.isFinite(x)) top = Math.max(top, Math.abs(x));
  return top || 1;
}
