"use strict";
// The page: draws its own data; one that a controller serves asks it for new steps.

const POLL = 3000, LONGEST_TAIL = 400;
const runPage = {data: JSON.parse(byId("data").textContent), tail: 0, problem: ""};

function head() {
  const {data, problem} = runPage, {phase, step, total, attempt, restarts, message} = data.status;
  byId("job").textContent = data.job;
  byId("status").replaceChildren(html("span", {class: `phase ${phase.replace(/\W/g, "")}`}, phase),
    ` · step ${step}${total ? ` of ${total}` : ""} · attempt ${attempt} · ${restarts} restarts · `,
    problem || (data.live ? "live" : `as of ${data.made}`));
  byId("message").textContent = message;
  byId("bounds").textContent = data.width === 1 ? `Every point of ${data.series.length} metrics is drawn.`
    : `${data.steps} steps, drawn with the smallest and the largest value of every ${data.width}: no spike is lost.`;
  if (data.hidden) byId("bounds").append(` ${data.hidden} metrics are left out; all are in metrics.jsonl.`);
  byId("steps-note").textContent = data.phases.width === 1 ? "Every step is drawn."
    : `Of every ${data.phases.width} steps the slowest one is drawn.`;
}

function sampleNote() {
  const {count, first, last, removed, steps} = runPage.data.samples;
  byId("samples-note").textContent = !count ? "" : `Steps ${first} to ${last} have samples in the store, ${count} in all; `
    + `this page has groups of ${steps.length}${removed ? `, without ${removed} that would be too large` : ""}. `
    + "Long answers have their beginning and end.";
}

function draw() {
  const {data} = runPage, axis = axisOf(data);
  head();
  validation(data, axis);
  byId("main").replaceChildren(...data.series.slice(0, data.main).map((one) => curve(one, data, axis)));
  byId("phases").replaceChildren(phases(data, axis));
  byId("idle").replaceChildren(idle(data, axis));
  byId("faults").replaceChildren(faults(data, axis));
  others();
}

function others() {
  if (!byId("more").open) return;
  const {data} = runPage, axis = axisOf(data), part = byId("filter").value.toLowerCase();
  byId("others").replaceChildren(...data.series.slice(data.main)
    .filter(({name}) => name.toLowerCase().includes(part)).map((one) => curve(one, data, axis)));
}

// Adds the summary of new steps to that of the steps before.
function extend(data, more) {
  if (!data.series.length) data.main = more.main;
  for (const {name, points} of more.series) {
    const known = data.series.find((one) => one.name === name);
    if (known) known.points.push(...points); else data.series.push({name, points});
  }
  const names = data.phases.phases;
  for (const name of more.phases.phases) {
    if (names.includes(name)) continue;
    names.push(name);
    for (const row of data.phases.rows) row[2].push(0);
  }
  for (const [step, total, seconds, idle] of more.phases.rows) {
    const spent = names.map((name) => seconds[more.phases.phases.indexOf(name)] || 0);
    data.phases.rows.push([step, total, spent, idle]);
  }
  for (const {kind, restart, marks} of more.faults) {
    let known = data.faults.find((one) => one.kind === kind);
    if (!known) data.faults.push(known = {kind, restart, marks: []});
    const fresh = marks.filter(([step, , text]) => !known.marks.some((m) => m[0] === step && m[2] === text));
    known.marks.push(...fresh);
  }
  extendValidation(data.validation, more.validation);
  data.last = more.last;
  data.steps += more.steps;
}

async function json(path) {
  const answer = await fetch(path);
  if (!answer.ok) throw new Error((await answer.json()).error);
  return answer.json();
}

async function renew() {
  const fetched = await json("v1/page/data");
  runPage.data = {...fetched, status: runPage.data.status, live: true};
  runPage.tail = 0;
  sampleNote();
  samples(runPage.data, ask);
}

async function poll() {
  try {
    const {last: {step, time}, validation: {last}} = runPage.data;
    const {status, new: more} = await json(`v1/page/steps?after=${step}&time=${time}&validated=${last}`);
    runPage.problem = "";
    runPage.data.status = status;
    if (more === null || runPage.tail + more.steps > LONGEST_TAIL) {
      await renew();
      draw();
    } else if (more.steps || more.faults.length || validatesMore(runPage.data.validation, more.validation)) {
      extend(runPage.data, more);
      runPage.tail += more.steps;
      draw();
    }
  } catch (error) {
    runPage.problem = `no answer: ${error.message}`;
  }
  head();
  setTimeout(poll, POLL);
}

async function ask(step, prompt, show) {
  try {
    const wanted = prompt === null ? "" : `&prompt=${prompt}`;
    const found = await json(`v1/page/samples?step=${step}${wanted}`);
    const {steps} = runPage.data.samples, known = steps.find((one) => one.step === step);
    if (known) known.shown.push(...found.shown.filter((group) => !known.shown.some((one) => one.prompt === group.prompt)));
    else steps.push(found);
    show({step, prompt});
  } catch (error) {
    byId("samples-note").textContent = error.message;
  }
}

byId("more").addEventListener("toggle", others);
byId("filter").addEventListener("input", others);
draw();
sampleNote();
samples(runPage.data, runPage.data.live ? ask : null);
if (runPage.data.live) setTimeout(poll, POLL);
