"use strict";
// Scores of the validation sets, each with its 95 % confidence interval, and the checkpoint that is kept.

const within = ([, mean, half]) => [mean, half].map((value) => short(Number(value.toPrecision(3)))).join(" ± ");
const scoresOf = ({curves}) => curves.filter(({name}) => name === "score");
const passesOf = ({curves}) => curves.filter(({name}) => name !== "score");

function validatedSteps({validation: {sets}}) {
  return sets.flatMap(({curves}) => curves.flatMap(({points}) => [points[0][0], points.at(-1)[0]]));
}

function validation(page, axis) {
  const {sets} = page.validation;
  byId("validation").hidden = !sets.length;
  byId("validation-note").textContent = validationNote(page.validation);
  byId("validations").replaceChildren(...sets.flatMap((set) => [scoresOf(set), passesOf(set)]
    .filter((curves) => curves.length).map((curves) => measures(set, curves, page, axis))));
}

function validationNote({sets, width, hidden, kept}) {
  const said = ["The bands are 95 % confidence intervals, over the prompts of a set."];
  const best = kept && keptPoint(sets.find(({name}) => name === kept.set), kept);
  if (kept) {
    said.push(`The checkpoint of step ${kept.step} is kept as the best of ${kept.set}${best ? `: ${within(best)}` : ""}.`);
  }
  if (width > 1) said.push(`Of every ${width} steps the smallest and the largest value are drawn.`);
  if (hidden) said.push(`${hidden} sets are left out; all are in validation.jsonl.`);
  return said.join(" ");
}

const keptPoint = (set, {step}) => set && scoresOf(set)[0]?.points.find(([at]) => at === step);

// Curves of one set in one drawing: its mean score, or pass@k for each k.
function measures(set, curves, page, axis) {
  const points = curves.flatMap((one) => one.points);
  const drawing = frame(400, 150, axis, Math.min(...points.map(([, mean, half]) => mean - half)),
    Math.max(...points.map(([, mean, half]) => mean + half)));
  restarts(drawing, page);
  keptMark(drawing, set, curves, page.validation.kept);
  curves.forEach((one, at) => {
    band(drawing, one.points, COLORS[at % COLORS.length]);
    polyline(drawing, one.points, "", COLORS[at % COLORS.length]);
  });
  const title = curves.length > 1 ? "pass@k" : curves[0].name;
  const made = figure(`${set.name}: ${title}`, drawing.node, "", {"data-set": set.name, "data-part": title});
  const list = made.node.appendChild(html("div"));
  const say = (step) => {
    const shown = curves.map(({points}) => nearest(points, step));
    made.reading.textContent = `${curves.length > 1 ? "" : within(shown[0])} at step ${shown[0][0]}`;
    if (curves.length < 2) return;
    list.replaceChildren(legend(curves.map(({name}, at) => [`${name} ${within(shown[at])}`, COLORS[at % COLORS.length]])));
  };
  say(axis.last);
  onStep(drawing, axis, say);
  return made.node;
}

function band(drawing, points, color) {
  const upper = points.map(([step, mean, half]) => [step, mean + half]);
  const lower = points.map(([step, mean, half]) => [step, mean - half]).reverse();
  const area = svg("polygon", {class: "band", points: places(drawing, [...upper, ...lower])});
  area.style.fill = area.style.stroke = color;
  drawing.node.append(area);
}

function keptMark(drawing, set, curves, kept) {
  if (!kept) return;
  const x = drawing.x(kept.step), text = `the checkpoint of step ${kept.step} is kept as the best of ${kept.set}`;
  drawing.node.append(svg("line", {class: "kept", x1: x, x2: x, y1: drawing.top, y2: drawing.bottom},
    svg("title", {}, text)));
  const best = kept.set === set.name && curves[0].name === "score" && keptPoint(set, kept);
  if (best) drawing.node.append(svg("circle", {class: "kept best", r: 6, cx: x, cy: drawing.y(best[1])}, svg("title", {}, text)));
}

const validatesMore = (known, more) =>
  more.last > known.last || known.last >= 0 && JSON.stringify(more.kept) !== JSON.stringify(known.kept);

// Adds the validations since to those before.
function extendValidation(known, more) {
  for (const {name, curves} of more.sets) {
    let set = known.sets.find((one) => one.name === name);
    if (!set) known.sets.push(set = {name, curves: []});
    for (const curve of curves) {
      const before = set.curves.find((one) => one.name === curve.name);
      if (before) before.points.push(...curve.points); else set.curves.push(curve);
    }
  }
  known.kept = more.kept;
  known.last = Math.max(known.last, more.last);
}
