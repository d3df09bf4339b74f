"use strict";
// Elements and axes. Text becomes text nodes and nothing else: what a model has written is never parsed.

const SVG = "http://www.w3.org/2000/svg";
const COLORS = ["#0969da", "#bc4c00", "#1a7f37", "#8250df", "#bf3989", "#9a6700", "#0598bc", "#cf222e",
  "#57606a", "#2da44e", "#a475f9", "#d4a72c", "#54aeff", "#ff8182", "#8c959f"];

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

const html = (name, attributes = {}, ...children) =>
  filled(document.createElement(name), attributes, children);
const svg = (name, attributes = {}, ...children) =>
  filled(document.createElementNS(SVG, name), attributes, children);
const byId = (id) => document.getElementById(id);

function short(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  return Number.isInteger(value) && size < 1e6 || size === 0 ? String(value)
    : size < 1e-3 || size >= 1e6 ? value.toExponential(2) : String(Number(value.toPrecision(4)));
}

function linear(low, high, from, to) {
  const span = high - low || 1;
  return (value) => from + (value - low) / span * (to - from);
}

// A drawing of `width` x `height` with rules and the axis of steps; x and y map values to places in it.
function frame(width, height, axis, low, high, label = short) {
  const left = 52, right = 8, top = 6, bottom = height - 16;
  if (low === high) [low, high] = [low - Math.abs(low || 1) / 2, high + Math.abs(high || 1) / 2];
  const x = linear(axis.first, axis.last, left, width - right), y = linear(low, high, bottom, top);
  const node = svg("svg", {viewBox: `0 0 ${width} ${height}`, role: "img"});
  for (const value of [low, (low + high) / 2, high]) {
    node.append(svg("line", {class: "rule", x1: left, x2: width - right, y1: y(value), y2: y(value)}),
      svg("text", {x: left - 4, y: y(value) + 3, "text-anchor": "end"}, label(value)));
  }
  const count = Math.max(Math.floor(width / 130), 2);
  for (const step of new Set(Array.from({length: count + 1},
    (_, at) => Math.round(axis.first + at * (axis.last - axis.first) / count)))) {
    node.append(svg("text", {x: x(step), y: height - 3,
      "text-anchor": step === axis.last ? "end" : "middle"}, String(step)));
  }
  return {node, x, y, top, bottom, width};
}

function figure(title, drawing, note = "", attributes = {}) {
  const reading = html("span", {}, note);
  return {reading, node: html("figure", attributes,
    html("figcaption", {}, html("b", {}, title), reading), drawing)};
}

// Calls `show` with the step under the pointer.
function onStep(drawing, axis, show) {
  drawing.node.addEventListener("mousemove", (event) => {
    const box = drawing.node.getBoundingClientRect();
    const place = (event.clientX - box.left) / box.width * drawing.width;
    show(linear(drawing.x(axis.first), drawing.x(axis.last), axis.first, axis.last)(place));
  });
}

function nearest(points, step) {
  let found = points[0];
  for (const point of points) if (Math.abs(point[0] - step) < Math.abs(found[0] - step)) found = point;
  return found;
}

const places = (drawing, points) =>
  points.map(([step, value]) => `${drawing.x(step).toFixed(2)},${drawing.y(value).toFixed(2)}`).join(" ");

// `color`: of CSS; default: that of the kind.
function polyline(drawing, points, kind = "", color = "") {
  const line = svg("polyline", {class: `curve ${kind}`, points: places(drawing, points)});
  line.style.stroke = color;
  drawing.node.append(line);
  if (points.length > 60) return;
  for (const [step, value] of points) {
    const dot = svg("circle", {class: `dot ${kind}`, r: 2, cx: drawing.x(step), cy: drawing.y(value)});
    dot.style.fill = color;
    drawing.node.append(dot);
  }
}
