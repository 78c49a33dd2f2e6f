// The text of a run at a step: what stands, what was just deleted and, if wished, all that was ever deleted.

import { el } from "./dom.js";
import { stands } from "./run.js";

/**
 * The text inside `root`. `onToken(step)` is called for a token of the model that is clicked, with the step after which it
 * stood, and `onHover(step or null)` for one that is pointed at.
 */
export function createText(root, { onToken, onHover }) {
  let spans = [];
  let shownCells = [];
  const stepOf = (event) => {
    const cell = shownCells[Number(event.target.closest(".cell")?.dataset.cell ?? -1)];
    return cell?.origin === "model" ? cell.born : null;
  };
  root.addEventListener("click", (event) => {
    const step = stepOf(event);
    if (step !== null) onToken(step);
  });
  root.addEventListener("pointerover", (event) => event.pointerType === "mouse" && onHover(stepOf(event)));
  root.addEventListener("pointerleave", () => onHover(null));

  return {
    /** Show the cells of a run at a step. `prompt` is its prompt as it was typed, if it was text. */
    show(cells, step, { prompt, keepDeleted, hidePrompt, isDone }) {
      if (cells !== shownCells) {
        const isSame = spans.length <= cells.length && spans.every((span, place) => span.token === cells[place].token);
        if (!isSame) {
          root.replaceChildren();
          spans = [];
        }
        for (const cell of cells.slice(spans.length)) {
          const span = spanOf(cell, prompt);
          spans.push({ span, token: cell.token });
          root.append(span);
        }
        shownCells = cells;
      }
      spans.forEach(({ span }, place) => {
        const cell = cells[place];
        const isGone = cell.died <= step;
        const isSeen = stands(cell, step) || cell.died === step || (isGone && keepDeleted);
        span.hidden = !isSeen || (hidePrompt && cell.origin === "prompt") || span.dataset.special === "true";
        span.classList.toggle("deleted", isGone);
        span.classList.toggle("now", cell.born === step && step > 0);
        span.classList.toggle("going", cell.died === step);
      });
      root.classList.toggle("done", isDone);
      // Follow the end of a long text, and let keys scroll it.
      root.scrollTop = root.scrollHeight;
      root.toggleAttribute("tabindex", root.scrollHeight > root.clientHeight);
      if (root.hasAttribute("tabindex")) root.tabIndex = 0;
    },
  };
}

/** A token as an element; the white space before it is left outside of what is coloured. */
function spanOf(cell, prompt) {
  const [, space, text] = /^(\s*)([\s\S]*)$/.exec(cell.token.text);
  const span = el("span", { class: `cell ${cell.origin}`, "data-cell": cell.number });
  if (text) span.append(space, el("span", { class: "ink" }, text));
  else span.append(el("span", { class: "ink" }, space.replaceAll("\n", "↵\n")));
  // <bos> and the like stand among the prompt's tokens, but nobody typed them; part of a character has no text of its own.
  const isUntyped = cell.origin === "prompt" && typeof prompt === "string" && !prompt.includes(text);
  const isSpecial = isUntyped || cell.token.text === "";
  if (isSpecial) span.dataset.special = "true";
  return span;
}
