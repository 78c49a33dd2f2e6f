// What the model considered at a step: the likeliest actions, each of which can be taken instead.

import { el, part, percent } from "./dom.js";
import { inWords, nameOf } from "./run.js";

/** The panel inside `root`. `onInstead(step, alternative)` and `onTyped(step, text)` continue from before that step. */
export function createThoughts(root, { onInstead, onTyped }) {
  const list = part(root, "alternatives");
  const form = part(root, "inject");
  const field = form.elements.token;
  let shown = { run: null, step: 0 };

  list.addEventListener("click", (event) => {
    const place = event.target.closest("button")?.dataset.place;
    if (place !== undefined) onInstead(shown.step, alternativesOf(shown.run, shown.step)[place]);
  });
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (!field.value.trim() || !shown.run?.start) return;
    onTyped(shown.step, field.value);
    field.value = "";
  });

  return {
    /** Show the decision that led to a step; at step 0, the one that comes next. */
    show(run, cells, step, isGlance = false) {
      const count = run.actions.length;
      root.hidden = !count;
      if (!count) return;
      const taken = Math.min(Math.max(step, 1), count);
      root.classList.toggle("glance", isGlance);
      shown = { run, step: taken };
      const action = run.actions[taken - 1];
      part(root, "step").textContent = `Step ${taken}`;
      part(root, "words").textContent = inWords(run, cells, taken);
      part(root, "p").textContent = percent(action.bkspc_prob);
      part(root, "v").textContent = action.value.toFixed(2);
      const others = alternativesOf(run, taken);
      part(root, "why").textContent =
        run.request.search && action.kind === "delete" && others[0] && others[0].kind !== "delete"
          ? "Everything else was tried here."
          : "Continue with another:";
      list.replaceChildren(...others.map((other, place) => rowOf(other, place, isTaken(other, action))));
    },
  };
}

/** The likeliest actions, and the one that was taken in the place of the last if it is not among them. */
function alternativesOf(run, step) {
  const action = run.actions[step - 1];
  const likely = action.alternatives ?? [];
  if (!likely.length || action.kind === "cut" || likely.some((other) => isTaken(other, action))) return likely;
  const { id, text } = action.token ?? { id: -1, text: "" };
  return [...likely.slice(0, -1), { id, text, prob: action.prob, kind: action.kind }];
}

function isTaken(other, action) {
  return other.kind === action.kind && (other.kind !== "write" || other.id === action.token.id);
}

function rowOf(other, place, taken) {
  const names = { delete: "⌫", end: "end" };
  const name = names[other.kind] ?? nameOf(other);
  const bar = el("span", { class: "bar" });
  bar.style.setProperty("--share", Math.max(0.004, Math.min(1, other.prob)));
  const button = el(
    "button",
    {
      type: "button",
      class: `other ${other.kind}${taken ? " taken" : ""}`,
      "data-place": place,
      disabled: other.kind === "end" || taken,
    },
    bar,
    el("span", { class: "spoken" }, taken ? "Taken: " : "Continue with "),
    el("span", { class: "name" }, name),
    el("span", { class: "prob" }, percent(other.prob)),
  );
  return el("li", {}, button);
}
