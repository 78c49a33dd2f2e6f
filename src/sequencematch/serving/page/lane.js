// One run on the page: its graph, its text, what the model considered, its timeline, and how it came out.

import { complete, tokenize } from "./api.js";
import { copyOf, part } from "./dom.js";
import { drawGraph } from "./graph.js";
import { addEvent, cellsOf, continued, injectedCell, inWords, nameOf, newRun, written } from "./run.js";
import { inShort } from "./settings.js";
import { readStar } from "./star.js";
import { createText } from "./text.js";
import { createThoughts } from "./thoughts.js";
import { createTimeline } from "./timeline.js";

/**
 * A lane inside `root`. `onStep(step)` moves the clock, `onBegin(lane)` and `onGrow()` tell of a new run and of its progress,
 * `onRecord(run)` asks for its animation.
 */
export function createLane(root, { onStep, onBegin, onGrow, onRecord, keepsDeleted }) {
  const article = copyOf("lane-template");
  root.append(article);
  const lane = { run: newRun({ prompt: "" }), isRunning: false };
  const earlier = [];
  let cells = [];
  let step = 0;
  let star = null;
  let showWalk = null;
  let control = null;

  const glance = (at) => thoughts.show(lane.run, cells, at ?? step, at !== null);
  const text = createText(part(article, "text"), { onToken: onStep, onHover: glance });
  const timeline = createTimeline(part(article, "timeline"), { onStep, onHover: glance });
  const thoughts = createThoughts(part(article, "thoughts"), {
    onInstead: (at, other) => instead(at, other),
    onTyped: (at, typed) => append(at - 1, typed),
  });
  part(article, "back").addEventListener("click", () => lane.load(earlier.pop()));
  part(article, "record").addEventListener("click", () => onRecord(lane.run));
  part(article, "again").addEventListener("click", () => lane.start(lane.run.request, lane.run.injected));

  /** Take another action than the one that led to a step. */
  function instead(at, other) {
    const before = at - 1;
    if (other.kind === "write") return begin(continued(lane.run, cells, before, [other.id]), 1);
    const request = continued(lane.run, cells, before, []);
    return begin({ ...request, prefix: request.prefix.slice(0, -1) }, 0);
  }

  /** Append a token, given by its text, to what stands at a step. */
  async function append(at, typed) {
    try {
      const known = idOf(typed);
      const ids = known === null ? await tokenize(lane.run.request.model, typed) : [known];
      if (ids.length) await begin(continued(lane.run, cells, at, ids), ids.length);
    } catch (fault) {
      lane.complain(fault);
    }
  }

  /** The id of a token that was seen in this run, or null. */
  function idOf(typed) {
    const { start, actions } = lane.run;
    const seen = [...start.prompt_tokens, ...(start.prefix_tokens ?? []), ...actions.flatMap((a) => a.alternatives ?? [])];
    const isSame = (token) => token.text === typed || token.text.trim() === typed.trim();
    return seen.find((token) => (token.kind ?? "write") === "write" && isSame(token))?.id ?? null;
  }

  async function begin(request, injected) {
    if (lane.run.actions.length) earlier.push(lane.run);
    await lane.start(request, injected);
  }

  function draw(prompt) {
    const found = readStar(prompt);
    if (JSON.stringify(found) === JSON.stringify(star)) return;
    star = found;
    const figure = part(article, "graph");
    figure.hidden = !star;
    article.classList.toggle("with-graph", Boolean(star));
    showWalk = star && drawGraph(figure, star, (name) => lane.run.start && append(step, name));
  }

  function refresh() {
    const count = lane.run.actions.length;
    const isDone = step >= count && lane.run.end !== null;
    const prompt = lane.run.request.prompt;
    text.show(cells, step, { prompt, keepDeleted: keepsDeleted(), hidePrompt: Boolean(star), isDone });
    timeline.show(lane.run, cells, step);
    thoughts.show(lane.run, cells, step);
    showWalk?.(cells, step);
    part(article, "title").textContent = inShort(lane.run.request);
    part(article, "back").hidden = !earlier.length;
    part(article, "record").disabled = !lane.run.end;
    const outcome = verdict();
    const badge = part(article, "badge");
    badge.textContent = outcome.words;
    badge.className = `badge ${outcome.mood}`;
  }

  /** How it stands, or how it came out, in words. */
  function verdict() {
    const { run } = lane;
    if (!run.start) return { words: lane.isRunning ? "asking…" : "", mood: "quiet" };
    const injected = injectedCell(run, cells);
    const isDone = step >= run.actions.length && run.end;
    if (injected && injected.died <= step) {
      const tail = isDone && star ? `; ${goalReached() ? "then found the goal" : "but ended elsewhere"}` : "";
      return { words: `Deleted the injected ${nameOf(injected.token)}${tail}`, mood: "good" };
    }
    if (!isDone) return { words: inWords(run, cells, step), mood: moodOf(run.actions[step - 1]) };
    if (injected && !(star && goalReached())) {
      return { words: `Kept the injected ${nameOf(injected.token)}`, mood: star ? "bad" : "quiet" };
    }
    const deleted = cells.filter((cell) => cell.died <= step).length;
    if (star) {
      const back = deleted ? `, ${deleted} step${deleted > 1 ? "s" : ""} taken back` : ", without a detour";
      if (goalReached()) return { words: `Found ${star.goal}${back}`, mood: "good" };
      const last = written(cells, step).at(-1);
      return { words: `Ended at ${last ? nameOf(last.token) : star.centre}, not at ${star.goal}`, mood: "bad" };
    }
    const tokens = written(cells, step).length;
    const cut = run.actions.at(-1)?.kind === "cut" ? ", cut there" : "";
    return { words: `${tokens} token${tokens === 1 ? "" : "s"} written, ${deleted} deleted${cut}`, mood: "good" };
  }

  function goalReached() {
    const path = written(cells, step).map((cell) => nameOf(cell.token));
    return star.arms.some((arm) => arm.at(-1) === star.goal && arm.join(" ") === path.join(" "));
  }

  Object.assign(lane, {
    article,
    /** Ask for a run and show it as it comes. */
    async start(request, injected = 0) {
      control?.abort();
      const own = (control = new AbortController());
      lane.run = newRun(request, injected);
      lane.isRunning = true;
      cells = [];
      draw(request.prompt);
      part(article, "notice").hidden = true;
      onBegin(lane);
      try {
        await complete(request, (event) => {
          if (own.signal.aborted) return;
          addEvent(lane.run, event);
          cells = cellsOf(lane.run);
          onGrow();
        }, own.signal);
      } catch (fault) {
        if (fault.name !== "AbortError") lane.complain(fault);
      }
      if (own !== control) return; // another run has begun
      lane.isRunning = false;
      onGrow();
    },
    stop() {
      control?.abort();
    },
    /** Show a finished run. */
    load(run) {
      control?.abort();
      control = null;
      lane.run = run;
      lane.isRunning = false;
      cells = cellsOf(run);
      part(article, "notice").hidden = true;
      draw(run.request.prompt);
      onBegin(lane);
    },
    /** Draw the graph of a prompt that is being typed; what ran before belongs to another prompt. */
    preview(prompt) {
      if (lane.isRunning || prompt === lane.run.request.prompt) return;
      lane.run = newRun({ ...lane.run.request, prompt, prefix: undefined });
      cells = [];
      earlier.length = 0;
      draw(prompt);
      onBegin(lane);
    },
    forget() {
      earlier.length = 0;
    },
    /** Say what went wrong. */
    complain(fault) {
      part(article, "notice").hidden = false;
      part(article, "fault").textContent = fault.message;
      part(article, "again").hidden = fault.status === 400 || fault.status === 404 || fault.status === 422;
    },
    show(at) {
      step = Math.min(at, lane.run.actions.length);
      refresh();
    },
    resize() {
      timeline.resize();
      refresh();
    },
    remove() {
      control?.abort();
      article.remove();
    },
  });
  return lane;
}

function moodOf(action) {
  return action?.kind === "delete" ? "bad" : action?.kind === "write" ? "good" : "quiet";
}
