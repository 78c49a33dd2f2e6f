// One column for each action: p(<bkspc>) and V(s) of the state in which it was taken, and the action itself.

import { el, svg } from "./dom.js";
import { nameOf } from "./run.js";

const P_HEIGHT = 56;
const GAP = 14;
const V_HEIGHT = 40;
const PAD = 5;
const HEIGHT = P_HEIGHT + GAP + V_HEIGHT + 2 * PAD;
const NARROWEST = 36;
const NARROWEST_ON_A_PHONE = 30;
const WIDEST = 96;

/** The timeline inside `root`. `onStep(step)` goes to a step, `onHover(step or null)` looks at one. */
export function createTimeline(root, { onStep, onHover }) {
  const picture = svg("svg", { class: "curves", "aria-hidden": "true" });
  const tape = el("div", { class: "tape", role: "group", "aria-label": "Actions, one for each step" });
  const strip = el("div", { class: "strip" }, picture, tape);
  root.replaceChildren(strip);
  let run = null;
  let buttons = [];
  let width = 0;
  let cover = null;
  let marks = [];

  const stepAt = (event) => {
    const x = event.clientX - picture.getBoundingClientRect().left;
    return Math.min(buttons.length, Math.max(1, Math.floor(x / width) + 1));
  };
  picture.addEventListener("pointerdown", (event) => {
    if (!buttons.length) return;
    onStep(stepAt(event));
    const move = (moved) => onStep(stepAt(moved));
    picture.addEventListener("pointermove", move);
    const end = () => picture.removeEventListener("pointermove", move);
    for (const name of ["pointerup", "pointercancel", "pointerleave"]) picture.addEventListener(name, end, { once: true });
  });
  const stepOf = (event) => Number(event.target.closest("button")?.dataset.step) || null;
  tape.addEventListener("click", (event) => stepOf(event) && onStep(stepOf(event)));
  tape.addEventListener("pointerover", (event) => event.pointerType === "mouse" && onHover(stepOf(event)));
  tape.addEventListener("pointerleave", () => onHover(null));
  tape.addEventListener("focusin", (event) => event.target.matches(":focus-visible") && onHover(stepOf(event)));
  tape.addEventListener("focusout", () => onHover(null));
  tape.addEventListener("keydown", (event) => {
    const place = buttons.indexOf(document.activeElement);
    const next = { ArrowLeft: place - 1, ArrowRight: place + 1, Home: 0, End: buttons.length - 1 }[event.key];
    if (next === undefined || !buttons[next]) return;
    event.preventDefault();
    event.stopPropagation();
    onStep(next + 1);
    buttons[next].focus();
  });

  // A run grows action by action: buttons that are there stay.
  function build() {
    const count = run.actions.length;
    const narrowest = root.clientWidth < 500 ? NARROWEST_ON_A_PHONE : NARROWEST;
    width = Math.min(WIDEST, Math.max(narrowest, Math.floor(root.clientWidth / Math.max(count, 1))));
    strip.style.setProperty("--column", `${width}px`);
    const added = run.actions.slice(buttons.length).map((action, place) => buttonOf(action, buttons.length + place + 1));
    buttons.push(...added);
    tape.append(...added);
    picture.setAttribute("viewBox", `0 0 ${count * width} ${HEIGHT}`);
    picture.style.width = `${count * width}px`;
    picture.style.height = `${HEIGHT}px`;
    cover = svg("rect", { class: "future", y: 0, height: HEIGHT });
    marks = [svg("circle", { class: "mark p", r: 4 }), svg("circle", { class: "mark v", r: 4 })];
    picture.replaceChildren(...curves(run.actions, width), cover, ...marks);
  }

  return {
    /** Show a run at a step. */
    show(shown, cells, step) {
      if (shown !== run) {
        run = shown;
        buttons = [];
        tape.replaceChildren();
      }
      root.hidden = !run.actions.length;
      if (root.hidden) return;
      if (run.actions.length !== buttons.length) build();
      const { p, v } = places(run.actions, width);
      cover.setAttribute("x", step * width);
      cover.setAttribute("width", Math.max(0, (buttons.length - step) * width));
      for (const [mark, points] of [[marks[0], p], [marks[1], v]]) {
        const [x, y] = points[Math.max(step, 1) - 1];
        mark.setAttribute("cx", x);
        mark.setAttribute("cy", y);
        mark.setAttribute("visibility", step ? "visible" : "hidden");
      }
      const lost = new Set(cells.filter((cell) => cell.died <= step).map((cell) => cell.born));
      buttons.forEach((button, place) => {
        const isCurrent = place + 1 === step;
        button.classList.toggle("lost", lost.has(place + 1));
        button.classList.toggle("future", place + 1 > step);
        if (isCurrent) button.setAttribute("aria-current", "step");
        else button.removeAttribute("aria-current");
        button.tabIndex = isCurrent || (step === 0 && place === 0) ? 0 : -1;
      });
      keepInView(root, step, width);
    },
    /** Fit the columns to a new width of the page. */
    resize() {
      if (run?.actions.length) build();
    },
  };
}

/** Centres of the columns and heights of both curves. */
function places(actions, width) {
  const values = actions.map((action) => action.value);
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const x = (place) => (place + 0.5) * width;
  return {
    p: actions.map((action, place) => [x(place), PAD + P_HEIGHT * (1 - action.bkspc_prob)]),
    v: values.map((value, place) => {
      const share = high > low ? (value - low) / (high - low) : 0.5;
      return [x(place), PAD + P_HEIGHT + GAP + V_HEIGHT * (1 - share)];
    }),
  };
}

function curves(actions, width) {
  const { p, v } = places(actions, width);
  const end = actions.length * width;
  const base = PAD + P_HEIGHT;
  const line = (points) => points.map(([x, y]) => `${x} ${y.toFixed(1)}`).join("L");
  const area = `M${p[0][0]} ${base}L${line(p)}L${p.at(-1)[0]} ${base}Z`;
  const deletions = actions.flatMap((action, place) =>
    action.kind === "delete"
      ? [svg("rect", { class: "deletion", x: place * width, width, y: 0, height: HEIGHT })]
      : [],
  );
  return [
    ...deletions,
    svg("path", { class: "axis", d: `M0 ${PAD}H${end}M0 ${base}H${end}` }),
    svg("path", { class: "area", d: area }),
    svg("path", { class: "curve p", d: `M${line(p)}` }),
    svg("path", { class: "curve v", d: `M${line(v)}` }),
  ];
}

function buttonOf(action, step) {
  const verb = { write: "writes ", delete: "deletes " }[action.kind] ?? "";
  const name = { write: () => nameOf(action.token), delete: () => "⌫", end: () => "end", cut: () => "cut" }[action.kind]();
  return el(
    "button",
    { type: "button", class: `action ${action.kind}`, "data-step": step },
    el("span", { class: "spoken" }, `Step ${step}: ${verb}`),
    el("span", { class: "name" }, name),
  );
}

/** Scroll sideways, and only sideways, so that a step is seen. */
function keepInView(root, step, width) {
  const x = (step - 0.5) * width;
  const margin = Math.min(root.clientWidth / 3, 2 * width);
  if (x < root.scrollLeft + margin) root.scrollLeft = x - margin;
  else if (x > root.scrollLeft + root.clientWidth - margin) root.scrollLeft = x - root.clientWidth + margin;
}
