"use strict";
// The browser of samples: steps, their groups, and the answers to a prompt beside each other.

const COLORINGS = {
  "plain text": null,
  "probability (trainer)": ({trainer}, at) => certain(trainer[at]),
  "probability (engine)": ({engine}, at) => certain(engine[at]),
  "trainer and engine differ": ({trainer, engine}, at) =>
    trainer[at] === null || engine[at] === null ? null : Math.min(Math.abs(trainer[at] - engine[at]), 1),
};
const certain = (logProb) => logProb === null ? null : 1 - Math.exp(logProb);

const view = {step: null, prompt: null, coloring: "plain text"};

function samples(page, ask) {
  const place = byId("samples"), {steps} = page.samples;
  if (!steps.length) {
    place.replaceChildren(html("p", {class: "note"}, "There are no samples."));
    return;
  }
  const shown = steps.find(({step}) => step === view.step) || steps.at(-1);
  const group = shown.shown.find(({prompt}) => prompt === view.prompt) || shown.shown[0];
  const again = (changes) => { Object.assign(view, changes); samples(page, ask); };
  const buttons = steps.map(({step}) =>
    pressed(`step ${step}`, step === shown.step, () => again({step, prompt: null})));
  if (ask) buttons.push(stepInput((step) => ask(step, null, again)));
  const choose = (prompt) => shown.shown.some((one) => one.prompt === prompt)
    ? again({step: shown.step, prompt}) : ask && ask(shown.step, prompt, again);
  place.replaceChildren(html("div", {class: "bar"}, ...buttons), groupChart(shown, group, choose),
    html("div", {class: "bar"}, ...shown.shown.map(({prompt}) =>
      pressed(`prompt ${prompt}`, group && prompt === group.prompt, () => choose(prompt)))));
  if (!group) return;
  place.append(html("div", {class: "prompt"}, html("h4", {}, `Prompt ${group.prompt}`),
    html("div", {class: "text"}, group.text)), html("div", {class: "bar colorings"},
    ...Object.keys(COLORINGS).map((coloring) =>
      pressed(coloring, coloring === view.coloring, () => again({coloring})))),
  html("p", {class: "note"}, note(group)), html("div", {class: "answers"}, ...group.answers.map(answer)));
}

function pressed(text, active, click) {
  const button = html("button", {"aria-pressed": String(Boolean(active)), type: "button"}, text);
  button.addEventListener("click", click);
  return button;
}

function stepInput(go) {
  const input = html("input", {type: "number", min: 1, placeholder: "another step", "aria-label": "step"});
  input.addEventListener("change", () => { if (input.value) go(Number(input.value)); });
  return input;
}

function note(group) {
  const all = group.answers.length === group.of ? `All ${group.of} answers`
    : `${group.answers.length} of ${group.of} answers, from the best to the worst`;
  return view.coloring === "plain text" ? `${all}, by score.`
    : `${all}, by score. Red: ${view.coloring === "trainer and engine differ"
      ? "log-probabilities differ by 1 or more" : "the token was improbable"}.`;
}

// Each group as its range of scores with its mean, from the lowest to the highest mean.
function groupChart({step, groups, of}, current, choose) {
  const scored = groups.filter(([, , , mean]) => mean !== null);
  if (!scored.length) return html("p", {class: "note"}, "No answer of this step has a score.");
  const low = Math.min(...scored.map(([, , lowest]) => lowest));
  const high = Math.max(...scored.map(([, , , , highest]) => highest));
  const drawing = frame(1180, 130, {first: 1, last: Math.max(scored.length, 2)}, low, high);
  const made = figure(`Scores of ${scored.length} of ${of} groups in step ${step}`, drawing.node,
    "a dot is a group's mean, its line the range of its scores");
  scored.forEach(([prompt, answers, lowest, mean, highest], at) => {
    const x = drawing.x(at + 1);
    const dot = svg("circle", {class: current && prompt === current.prompt ? "group shown" : "group", cx: x,
      cy: drawing.y(mean), r: scored.length > 100 ? 2.5 : 4, "data-prompt": prompt},
    svg("title", {}, `prompt ${prompt}: ${answers} answers, scores ${short(lowest)} to ${short(highest)}, mean ${short(mean)}`));
    dot.addEventListener("click", () => choose(prompt));
    drawing.node.append(svg("line", {class: "range", x1: x, x2: x, y1: drawing.y(lowest), y2: drawing.y(highest)}), dot);
  });
  return made.node;
}

function answer(one) {
  const figures = [["score", one.score], ["verifier", one.verifier_score], ...Object.entries(one.parts),
    ["advantage", one.advantage], ["tokens", one.length], ["log-prob gap", one.log_prob_gap_mean],
    ["version", one.version]];
  const list = html("dl", {}, ...figures.filter(([, value]) => value !== null)
    .map(([name, value]) => html("div", {}, html("dt", {}, name), html("dd", {}, short(value)))));
  const title = one.uid === null ? "No answer" : `Answer ${one.uid}`;
  const card = html("div", {class: "answer"}, html("h4", {}, title), list);
  if (one.dropped) card.append(html("p", {class: "note"}, `Not trained on: ${one.dropped}`));
  if (one.engine) card.append(html("p", {class: "note"}, `Engine ${one.engine}${parts(one)}`));
  card.append(html("div", {class: "text"}, ...text(one)));
  return card;
}

function parts({spans}) {
  return spans.length < 2 ? "" : `; weights: ${spans.map(([version, end]) => `v${version} up to token ${end}`).join(", ")}`;
}

function text(one) {
  const heat = COLORINGS[view.coloring], {pieces, first} = one.tokens;
  if (!heat) return [one.text];
  const spans = pieces.map((piece, at) => token(piece, heat(one.tokens, at), one.tokens, at));
  const missing = one.length - pieces.length;
  if (missing > 0) spans.splice(first, 0, html("div", {class: "gap"}, `… ${missing} tokens are left out …`));
  return spans;
}

function token(piece, heat, {trainer, engine}, at) {
  const span = html("span", {class: "token",
    title: `log-probability: trainer ${short(trainer[at])}, engine ${short(engine[at])}`}, piece);
  if (heat !== null) span.style.backgroundColor = `rgba(248, 81, 73, ${(heat * .85).toFixed(3)})`;
  return span;
}
