// Numbers, colours, canvases and small charts.

function fmt(x, digits = 4) {
  if (Number.isNaN(x)) return "NaN";
  if (!Number.isFinite(x)) return x < 0 ? "−∞" : "∞";
  if (x === 0) return "0";
  const size = Math.abs(x);
  const text = size >= 1e5 || size < 1e-4 ? x.toExponential(digits - 2) : x.toPrecision(digits);
  return text.replace(/-/g, "−");
}

// For cells: a small number in few characters.
function short(x) {
  const size = Math.abs(x);
  return size !== 0 && size < 0.001 ? x.toExponential(0).replace(/-/g, "−") : fmt(x, 3);
}

function bytesText(n) {
  return n < 10000 ? `${n.toLocaleString("en")} B` : `${(n / 1024).toFixed(1)} KiB`;
}

function css(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function rgb(name) {
  const hex = css(name).slice(1);
  return [0, 2, 4].map((n) => parseInt(hex.slice(n, n + 2), 16));
}

const mix = (a, b, t) => a.map((x, n) => Math.round(x + (b[n] - x) * t));
const paint = (c) => `rgb(${c.join(",")})`;

let palette = null; // read once for each theme

function colours() {
  palette ??= Object.fromEntries(["low", "middle", "high", "weight", "panel", "hidden", "hatch", "ink", "accent",
    "mark", "line", "done"].map((name) => [name, rgb(`--${name}`)]));
  return palette;
}

// A scale maps a number to a colour: "signed" from -top to top, "weight" from 0 to top.
function scale(kind, top) {
  const c = colours();
  return {
    kind, top,
    of(x) {
      if (Number.isNaN(x)) return c.mark;
      const t = Math.min(Math.abs(x) / top, 1);
      return mix(c.middle, kind === "weight" ? c.weight : x < 0 ? c.low : c.high, Math.sqrt(t));
    },
  };
}

function textOn(c) {
  const [r, g, b] = c.map((x) => { const s = x / 255; return s <= 0.04 ? s / 12.92 : ((s + 0.055) / 1.055) ** 2.4; });
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.179 ? "#000000" : "#ffffff"; // either way 4.5 or more
}

// A canvas at the screen's resolution; returns its context in CSS pixels.
function open2d(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  return context;
}

function hatch(context, x, y, w, h, gap = 6) {
  context.save();
  context.beginPath();
  context.rect(x, y, w, h);
  context.clip();
  context.strokeStyle = paint(colours().hatch);
  context.lineWidth = 0.8;
  context.beginPath();
  for (let d = -h; d < w; d += gap) { context.moveTo(x + d, y + h); context.lineTo(x + d + h, y); }
  context.stroke();
  context.restore();
}

function dots(context, x, y, w, h, gap = 7) {
  context.fillStyle = paint(colours().hatch);
  for (let a = x + gap / 2; a < x + w; a += gap) {
    for (let b = y + gap / 2; b < y + h; b += gap) context.fillRect(a - 0.7, b - 0.7, 1.4, 1.4);
  }
}

function legend(element, shade, text) {
  element.replaceChildren();
  const signed = shade.kind === "signed";
  const canvas = document.createElement("canvas");
  canvas.setAttribute("aria-hidden", "true");
  const context = open2d(canvas, 180, 12);
  for (let x = 0; x < 180; x++) {
    context.fillStyle = paint(shade.of(signed ? (x / 179 * 2 - 1) * shade.top : x / 179 * shade.top));
    context.fillRect(x, 0, 1, 12);
  }
  element.append(span(signed ? fmt(-shade.top, 3) : "0"), canvas, span(fmt(shade.top, 3)), span(text));
}

function span(text, className = "") {
  return node("span", { className, textContent: text });
}

function node(name, properties = {}, children = []) {
  const element = Object.assign(document.createElement(name), properties);
  element.append(...children);
  return element;
}

// One row of numbers as a strip of colours, the numbers themselves in its label.
function strip(numbers, shade, label) {
  const canvas = node("canvas", { className: "strip" });
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", `${label}: ${Array.from(numbers, (x) => fmt(x)).join(", ")}`);
  canvas.title = Array.from(numbers, (x) => fmt(x)).join("  ");
  const context = open2d(canvas, 84, 18);
  const width = 84 / numbers.length;
  numbers.forEach((x, n) => {
    context.fillStyle = paint(shade.of(x));
    context.fillRect(n * width, 0, Math.ceil(width), 18);
  });
  return canvas;
}

// A table cell with a number: the text is rounded, data-value has every digit.
function cell(x, options = {}) {
  const td = node("td", { textContent: options.text ?? fmt(x, options.digits ?? 4), className: options.className ?? "" });
  td.dataset.value = String(x);
  if (options.name) td.dataset.name = options.name;
  if (options.shade) {
    const c = options.shade.of(x);
    td.style.background = paint(c);
    td.style.color = textOn(c);
  }
  return td;
}

// A heading that starts with "|" stands above pictures: they and it begin at the left.
function headers(names) {
  const one = (name) => node("th", { scope: "col", textContent: name.replace("|", ""), className: name[0] === "|" ? "pic" : "" });
  const row = node("tr", {}, names.map(one));
  return node("thead", {}, [row]);
}

const SVG = "http://www.w3.org/2000/svg";

function svg(name, attributes = {}, children = []) {
  const element = document.createElementNS(SVG, name);
  Object.entries(attributes).forEach(([key, value]) => element.setAttribute(key, value));
  element.append(...children);
  return element;
}

// Bars of `now` filled, of `final` outlined, one pair for each entry.
function bars(now, final, label) {
  const width = 520, height = 120, left = 44, zero = 12 + (height - 24) / 2;
  const top = Math.max(1e-30, ...Array.from(now, Math.abs).filter(Number.isFinite), ...Array.from(final, Math.abs).filter(Number.isFinite));
  const slot = (width - left) / final.length, reach = (height - 24) / 2;
  const box = (x, n, className, inset) => {
    const tall = Number.isFinite(x) ? Math.abs(x) / top * reach : 0;
    return svg("rect", {
      class: className, x: left + n * slot + inset, width: Math.max(slot - 2 * inset, 1),
      y: x < 0 ? zero : zero - tall, height: tall,
    });
  };
  const parts = [
    ...Array.from(now, (x, n) => box(x, n, "now", slot * 0.22)),
    ...Array.from(final, (x, n) => box(x, n, "final", slot * 0.1)),
    svg("line", { class: "axis", x1: left, x2: width, y1: zero, y2: zero }),
  ];
  [[top, 12], [0, zero], [-top, height - 12]].forEach(([x, y]) => {
    const text = svg("text", { x: left - 6, y: y + 4, "text-anchor": "end" });
    text.textContent = fmt(x, 2);
    parts.push(text);
  });
  return svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label }, parts);
}

// One bar for each tile of the row: how far the answer then was from the final one.
function fallOff(distances, here, label, names) {
  const width = 520, height = 88, left = 44, foot = 22;
  const top = Math.max(1e-30, ...distances.filter(Number.isFinite)), slot = (width - left) / distances.length;
  const parts = distances.map((x, n) => {
    const tall = Math.max((Number.isFinite(x) ? x / top : 1) * (height - foot - 10), 1);
    const bar = svg("rect", {
      class: n === here ? "far here" : "far", x: left + n * slot + 1, width: Math.max(slot - 2, 1), y: height - foot - tall, height: tall,
    });
    bar.append(svg("title", {}, [`after key tile ${n}: ${fmt(x)}`]));
    return bar;
  });
  const text = svg("text", { x: left - 6, y: 14, "text-anchor": "end" });
  text.textContent = fmt(top, 2);
  parts.push(text, svg("line", { class: "axis", x1: left, x2: width, y1: height - foot, y2: height - foot }));
  const every = Math.ceil(names.length / 16);
  names.forEach((name, n) => {
    if (n % every) return;
    const under = svg("text", { x: left + (n + 0.5) * slot, y: height - 6, "text-anchor": "middle" });
    under.textContent = name;
    parts.push(under);
  });
  return svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label }, parts);
}
