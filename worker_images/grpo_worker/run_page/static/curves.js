"use strict";
// Curves, phases, idle time and faults, all on the same axis of steps.

function axisOf(page) {
  const steps = page.series.flatMap(({points}) => points.length ? [points[0][0], points.at(-1)[0]] : []);
  const marks = page.faults.flatMap(({marks}) => marks.map(([step]) => step));
  const all = [...steps, ...marks, ...validatedSteps(page)];
  return all.length ? {first: Math.min(...all), last: Math.max(...all)} : {first: 0, last: 1};
}

function restarts(drawing, page) {
  const marks = page.faults.flatMap((fault) => fault.restart ? fault.marks : []);
  const opacity = marks.length > 20 ? .3 : 1;
  for (const [step, , text] of marks) {
    const place = drawing.x(step);
    drawing.node.append(svg("line", {class: "restart", x1: place, x2: place, y1: drawing.top,
      y2: drawing.bottom, opacity}, svg("title", {}, `restart at step ${step}: ${text}`)));
  }
}

function curve({name, points}, page, axis, width = 400, height = 150) {
  const values = points.map(([, value]) => value);
  const drawing = frame(width, height, axis, Math.min(...values), Math.max(...values));
  restarts(drawing, page);
  polyline(drawing, points);
  const say = ([step, value]) => `${short(value)} at step ${step}`;
  const made = figure(name, drawing.node, say(points.at(-1)), {"data-metric": name});
  onStep(drawing, axis, (step) => { made.reading.textContent = say(nearest(points, step)); });
  return made.node;
}

function phases(page, axis) {
  const {phases: names, rows, width} = page.phases;
  if (!rows.length) return html("p", {class: "note"}, "No step is finished yet.");
  const highest = Math.max(...rows.map(([, , seconds]) => seconds.reduce((sum, one) => sum + one, 0)));
  const drawing = frame(1180, 220, axis, 0, highest, (value) => `${short(value)} s`);
  const broad = Math.max(Math.min(drawing.x(axis.first + width) - drawing.x(axis.first), 24) * .9, 1);
  for (const [step, total, seconds] of rows) {
    let below = 0;
    const bar = svg("g", {"data-step": step});
    seconds.forEach((spent, at) => {
      if (!spent) return;
      bar.append(svg("rect", {x: drawing.x(step) - broad / 2, width: broad, y: drawing.y(below + spent),
        height: drawing.y(below) - drawing.y(below + spent), fill: COLORS[at % COLORS.length]},
      svg("title", {}, `step ${step} (${short(total)} s): ${names[at]} ${short(spent)} s`)));
      below += spent;
    });
    drawing.node.append(bar);
  }
  restarts(drawing, page);
  const made = figure("Phases of a step", drawing.node, "seconds");
  onStep(drawing, axis, (step) => {
    const [at, total] = nearest(rows, step);
    made.reading.textContent = `step ${at}: ${short(total)} s`;
  });
  made.node.append(legend(names.map((name, at) => [name, COLORS[at % COLORS.length]])));
  return made.node;
}

function legend(entries) {
  return html("ul", {class: "legend"}, ...entries.map(([name, color]) => {
    const swatch = html("span", {class: "swatch"});
    swatch.style.backgroundColor = color;
    return html("li", {}, swatch, name);
  }));
}

function idle(page, axis) {
  const {pools, rows} = page.phases;
  const share = (at) => rows.filter(([, total, , idle]) => idle[at] !== null && total > 0)
    .map(([step, total, , idle]) => [step, Math.min(idle[at] / total, 1) * 100]);
  const drawing = frame(1180, 110, axis, 0, 100, (value) => `${value} %`);
  restarts(drawing, page);
  const shown = pools.map((name, at) => [name, share(at)]).filter(([, points]) => points.length);
  if (!shown.length) return html("p", {class: "note"}, "The records do not have the idle time of the pools.");
  shown.forEach(([, points], at) => polyline(drawing, points, at ? "second" : ""));
  const made = figure("Idle GPU time of a step", drawing.node, "percent of its seconds");
  onStep(drawing, axis, (step) => {
    made.reading.textContent = shown.map(([name, points]) => {
      const [at, percent] = nearest(points, step);
      return `${name} ${short(percent)} % at step ${at}`;
    }).join(", ");
  });
  made.node.append(legend(shown.map(([name], at) => [name, at ? "var(--second)" : "var(--curve)"])));
  return made.node;
}

function faults(page, axis) {
  if (!page.faults.length) return html("p", {class: "note"}, "No faults and no restarts.");
  const height = 24 + 32 * page.faults.length;
  const drawing = frame(1180, height, axis, 0, 1, () => "");
  const made = figure("Faults and restarts", drawing.node, "a mark names what happened");
  page.faults.forEach(({kind, restart, marks}, lane) => {
    const y = 28 + 32 * lane;
    for (const [step, count, text] of marks) {
      const mark = svg("circle", {class: restart ? "mark of-restart" : "mark", cx: drawing.x(step), cy: y,
        r: Math.min(4 + Math.log2(count), 9), "data-step": step}, svg("title", {}, text));
      mark.addEventListener("mouseenter", () => {
        made.reading.textContent = `step ${step}, ${count} × ${kind}: ${text}`;
      });
      drawing.node.append(mark);
    }
    drawing.node.append(svg("text", {x: 56, y: y - 10}, kind));
  });
  return made.node;
}
