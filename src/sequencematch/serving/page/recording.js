// A run as an animated SVG, which pages that run no script show too. serving/recording.py makes the same file, byte for byte.

import { cellsOf, deletedAt, nameOf as tokenName, stands } from "./run.js";
import { inShort } from "./settings.js";
import { edgesOf, layOut, RADIUS, readStar } from "./star.js";

/** Seconds of one action, of the last picture, and of a move in the graph. */
const FRAME_S = 0.6;
const REST_S = 2.8;
const MOVE_S = 0.3;
const WIDTH = 800;
const MARGIN = 26;
const FOOT = 30;
const GRAPH = { width: 370, height: 350 };
/** Words, and the few words that stand beside a graph. */
const SMALL = { size: 18, line: 30, letter: 10.8 };
const LARGE = { size: 25, line: 40, letter: 15 };
const P_HEIGHT = 54;
const GAP = 14;
const V_HEIGHT = 36;
const WIDEST = 58;
const LONGEST_PROMPT = 240;
const CSS = [
  "svg{--card:#fffefb;--ink:#1c2430;--soft:#5a6473;--line:#e2dccf;--edge:#c3bdae;--green:#1a7341;--green-wash:#d5efde;",
  "--red:#b23427;--red-wash:#f9deda;--gold:#c98f00;--blue:#255f84;--blue-wash:#dcebf4;",
  "font:15px ui-sans-serif,system-ui,sans-serif;fill:var(--ink)}",
  "@media(prefers-color-scheme:dark){svg{--card:#181e26;--ink:#e8ecf1;--soft:#9ba6b4;--line:#2c3541;--edge:#445060;",
  "--green:#77d69c;--green-wash:#1b3b2a;--red:#ff968a;--red-wash:#46241f;--gold:#f0bd36;--blue:#8cc4e8;",
  "--blue-wash:#1a3242}}.card{fill:var(--card);stroke:var(--line)}.soft{fill:var(--soft)}",
  ".title{fill:var(--soft);font-weight:600}.note{font-weight:600;font-size:17px}.good{fill:var(--green)}.bad{fill:var(--red)}",
  ".word{font-family:ui-monospace,monospace;white-space:pre}.prompt{fill:var(--soft)}.given{fill:var(--blue)}",
  ".strike{stroke:var(--red);stroke-width:2}.wash{fill:var(--red-wash)}.axis{stroke:var(--line)}",
  ".p,.v,.jump{fill:none;stroke-width:2;stroke-linecap:round}.p{stroke:var(--red)}.v{stroke:var(--blue)}.dot{stroke:none}",
  ".dot.p{fill:var(--red)}.dot.v{fill:var(--blue)}.zone{fill:var(--red-wash);fill-opacity:.6}",
  ".label{font:12px ui-monospace,monospace;text-anchor:middle}.label.cut{fill:var(--red);font-family:sans-serif}",
  ".edge{stroke:var(--edge);stroke-width:2}.disc{fill:var(--card);stroke:var(--edge);stroke-width:2}",
  ".name{font-weight:600;text-anchor:middle;dominant-baseline:central}.goal{fill:none;stroke:var(--gold);stroke-width:3.5}",
  ".jump{stroke:var(--green);stroke-dasharray:7 6}.walker{fill:var(--green);fill-opacity:.28}",
].join("");
/** How a node and an edge look: not visited, on the path that stands, left again. */
const DISCS = {
  new: "fill:var(--card);stroke:var(--edge)",
  on: "fill:var(--green-wash);stroke:var(--green)",
  left: "fill:var(--red-wash);stroke:var(--red)",
};
const EDGES = {
  new: "stroke:var(--edge);stroke-width:2;stroke-dasharray:none",
  on: "stroke:var(--green);stroke-width:5;stroke-dasharray:none",
  left: "stroke:var(--red);stroke-width:2.5;stroke-dasharray:3 5",
};

/** The animation, which starts again when it has ended. */
export function recording(run) {
  const cells = cellsOf(run);
  const star = readStar(run.request.prompt);
  const picture = createPicture(run.actions.length + 1);
  let left = MARGIN;
  let height = 0;
  if (star) {
    height = drawGraph(picture, star, cells);
    left += GRAPH.width + 20;
  }
  let bottom = write(picture, cells, left, star ? null : run.request.prompt);
  bottom = plot(picture, run.actions, left, Math.max(bottom + 22, star ? height - 118 : 0));
  height = Math.max(height, bottom) + FOOT;
  for (let frame = 0; frame < picture.frames; frame += 1) {
    const [mood, words] = note(run.actions, cells, star, frame);
    picture.body.push(`<text class="note ${mood} ${picture.during(frame)}" x="${left}" y="76">${escape(words)}</text>`);
  }
  const title = `<text class="title" x="${left}" y="46">${escape(inShort(run.request))}</text>`;
  const name = `<text class="soft" x="${WIDTH - MARGIN}" y="46" text-anchor="end">SequenceMatch</text>`;
  const size = `width="${WIDTH}" height="${number(height)}"`;
  const card = `<rect class="card" x=".5" y=".5" width="${WIDTH - 1}" height="${number(height - 1)}" rx="14"/>`;
  const style = `<style>${CSS}${[...picture.rules.values()].join("")}</style>`;
  const open = `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 ${WIDTH} ${number(height)}" ${size}>`;
  return `${open}${style}${card}${title}${name}${picture.body.join("")}</svg>\n`;
}

/** Elements, and the rules that animate them. A class is named once for all elements that change in the same frame. */
function createPicture(frames) {
  const seconds = FRAME_S * (frames - 1) + REST_S;
  const picture = { frames, rules: new Map(), body: [] };
  /** The start of a frame, in percent of a round. */
  picture.share = (frame) => {
    const hundredths = Math.floor((1e4 * (FRAME_S * frame)) / seconds + 0.5);
    return `${Math.floor(hundredths / 100)}.${String(hundredths % 100).padStart(2, "0")}%`;
  };
  /** A class with these keyframes; `still` is shown where animations are not. */
  picture.animate = (name, still, stops, timing = "step-end") => {
    const rule = `.${name}{${still}animation:${name} ${number(seconds)}s ${timing} infinite}@keyframes ${name}{${stops}}`;
    picture.rules.set(name, rule);
    return name;
  };
  /** The class of what is seen from a frame on. */
  picture.since = (frame) =>
    frame === 0 ? "s0" : picture.animate(`s${frame}`, "", `0%{opacity:0}${picture.share(frame)}{opacity:1}`);
  /** The class of what is seen before a frame. */
  picture.until = (frame) =>
    picture.animate(`u${frame}`, "opacity:0;", `0%{opacity:1}${picture.share(frame)}{opacity:0}`);
  /** The class of what is seen in one frame; the last one stays. */
  picture.during = (frame) => {
    const isLast = frame === frames - 1;
    const before = frame === 0 ? "" : "0%{opacity:0}";
    const after = isLast ? "" : `${picture.share(frame + 1)}{opacity:0}`;
    return picture.animate(`f${frame}`, isLast ? "" : "opacity:0;", `${before}${picture.share(frame)}{opacity:1}${after}`);
  };
  /** The class of an element with a state in each frame. */
  picture.changing = (name, states, styles) => {
    if (new Set(states).size === 1) {
      picture.rules.set(name, `.${name}{${styles[states[0]]}}`);
      return name;
    }
    const stops = states.map((state, frame) =>
      frame === 0 || state !== states[frame - 1] ? `${picture.share(frame)}{${styles[state]}}` : "",
    );
    return picture.animate(name, `${styles[states.at(-1)]};`, stops.join(""));
  };
  return picture;
}

/** Draw the graph and the walk through it; returns where it ends below. */
function drawGraph(picture, star, cells) {
  const { nodes, width, height } = layOut(star);
  const at = new Map(nodes.map((node) => [node.name, node]));
  const scale = Math.min(GRAPH.width / width, GRAPH.height / height);
  const [x, y] = [MARGIN + (GRAPH.width - width * scale) / 2, 26];
  const walked = cells.filter((cell) => cell.origin !== "prompt");
  const frames = Array.from({ length: picture.frames }, (_, frame) => frame);
  const from = (cell) => (cell.below === null || cell.below.origin === "prompt" ? star.centre : nameOf(cell.below));
  const states = (of) =>
    frames.map((frame) => {
      const begun = of.filter((cell) => cell.born <= frame);
      return begun.some((cell) => stands(cell, frame)) ? "on" : begun.length ? "left" : "new";
    });
  picture.body.push(`<g transform="translate(${number(x)} ${number(y)}) scale(${scale.toFixed(3)})">`);
  const pairs = edgesOf(star, nodes).map(([start, end]) => [nodes[start].name, nodes[end].name]);
  const isPair = (before, node) => (cell) => from(cell) === before && nameOf(cell) === node;
  pairs.forEach(([before, node], place) => {
    const [start, end] = [at.get(before), at.get(node)];
    const name = picture.changing(`e${place}`, states(walked.filter(isPair(before, node))), EDGES);
    const ends = `x1="${number(start.x)}" y1="${number(start.y)}" x2="${number(end.x)}" y2="${number(end.y)}"`;
    picture.body.push(`<line class="edge ${name}" ${ends}/>`);
  });
  for (const cell of walked) {
    if (pairs.some(([before, node]) => isPair(before, node)(cell))) continue;
    if (at.has(from(cell)) && at.has(nameOf(cell))) {
      picture.body.push(jump(picture, cell, at.get(from(cell)), at.get(nameOf(cell))));
    }
  }
  const top = (frame) => walked.findLast((cell) => stands(cell, frame) && at.has(nameOf(cell)));
  walk(picture, frames.map((frame) => at.get(top(frame) ? nameOf(top(frame)) : star.centre)));
  nodes.forEach((node, place) => {
    const seen = place === 0 ? frames.map(() => "on") : states(walked.filter((cell) => nameOf(cell) === node.name));
    const name = picture.changing(`n${place}`, seen, DISCS);
    const where = `cx="${number(node.x)}" cy="${number(node.y)}"`;
    if (node.name === star.goal) picture.body.push(`<circle class="goal" r="${RADIUS + 5}" ${where}/>`);
    picture.body.push(`<circle class="disc ${name}" r="${RADIUS}" ${where}/>`);
    picture.body.push(`<text class="name" x="${number(node.x)}" y="${number(node.y)}">${escape(node.name)}</text>`);
  });
  picture.body.push("</g>");
  return y + height * scale;
}

/** A bent line between nodes that no edge joins, as long as the token stands. */
function jump(picture, cell, start, end) {
  const x = (start.x + end.x) / 2 + 0.18 * (end.y - start.y);
  const y = (start.y + end.y) / 2 - 0.18 * (end.x - start.x);
  const curve = `M${number(start.x)} ${number(start.y)}Q${number(x)} ${number(y)} ${number(end.x)} ${number(end.y)}`;
  const drawn = `<path class="jump ${picture.since(cell.born)}" d="${curve}"/>`;
  return cell.died === Infinity ? drawn : `<g class="${picture.until(cell.died)}">${drawn}</g>`;
}

/** A halo around the node where the walk is; it moves at the start of a frame. */
function walk(picture, tops) {
  const to = (place) => `{transform:translate(${number(place.x)}px,${number(place.y)}px)}`;
  const stops = [`0%${to(tops[0])}`];
  for (let frame = 1; frame < tops.length; frame += 1) {
    if (tops[frame] === tops[frame - 1]) continue;
    stops.push(`${picture.share(frame)}${to(tops[frame - 1])}`);
    stops.push(`${picture.share(frame + MOVE_S / FRAME_S)}${to(tops[frame])}`);
  }
  stops.push(`100%${to(tops.at(-1))}`);
  const name = picture.animate("w", `${to(tops.at(-1)).slice(1, -1)};`, stops.join(""), "ease-in-out");
  picture.body.push(`<circle class="walker ${name}" r="${RADIUS + 7}"/>`);
}

/**
 * Write all tokens, in lines; a deleted one is struck through. Returns where the lines end.
 *
 * `asked` is the prompt as it was given; tokens such as <bos> are not in it. Null leaves the prompt out: a graph stands for it.
 */
function write(picture, cells, left, asked) {
  const { size, line, letter } = asked === null ? LARGE : SMALL;
  let [x, y] = [left, 78 + line];
  const isKept = (cell) => cell.origin === "prompt" && cell.died === Infinity;
  const isAsked = (text) => typeof asked !== "string" || asked.includes(text.trim());
  const letters = [...cells.filter(isKept).map((cell) => cell.token.text).filter(isAsked).join("")];
  const isLong = letters.length > LONGEST_PROMPT;
  const prompt = (isLong ? "…" : "") + letters.slice(isLong ? letters.length - LONGEST_PROMPT : 0).join("");
  const words = asked === null ? [] : (prompt.match(/\s*\S+|\s+/g) ?? []).map((word) => [word, "prompt", null]);
  const shown = cells.filter((cell) => cell.origin !== "prompt" || cell.died < Infinity);
  picture.body.push(`<g font-size="${size}">`);
  for (const [text, kind, cell] of [...words, ...shown.map((one) => [one.token.text, one.origin, one])]) {
    const word = text.trim();
    const space = text.slice(0, text.length - text.trimStart().length);
    if (space.includes("\n")) [x, y] = [left, y + line];
    else if (x > left) x += letter * space.length;
    if (!word) continue;
    const width = letter * [...word].length;
    if (x + width > WIDTH - MARGIN && x > left) [x, y] = [left, y + line];
    picture.body.push(wordAt(picture, word, kind, cell, x, y, width));
    x += width;
    if (text.slice(text.trimEnd().length).includes("\n")) [x, y] = [left, y + line];
  }
  picture.body.push("</g>");
  return y;
}

function wordAt(picture, word, kind, cell, x, y, width) {
  const height = width / [...word].length / 0.6;
  const where = `x="${number(x)}" y="${number(y)}" textLength="${number(width)}" lengthAdjust="spacingAndGlyphs"`;
  const origin = { prompt: " prompt", prefix: " given" }[kind] ?? "";
  let drawn = `<text class="word${origin}" ${where}>${escape(word)}</text>`;
  if (cell !== null && cell.died !== Infinity) {
    const colour = { prompt: "var(--soft)", prefix: "var(--blue)" }[kind] ?? "var(--ink)";
    const stops = `0%{fill:${colour}}${picture.share(cell.died)}{fill:var(--red)}`;
    const name = picture.animate(`d${cell.died}`, "fill:var(--red);", stops);
    const wash = `<rect class="wash ${picture.during(cell.died)}" x="${number(x - 2)}" y="${number(y - 1.1 * height)}" width="${number(width + 4)}"`;
    const line = `<path class="strike ${picture.since(cell.died)}" d="M${number(x - 2)} ${number(y - 0.33 * height)}h${number(width + 4)}"/>`;
    drawn = `${wash} height="${number(1.5 * height)}" rx="5"/><text class="word ${name}" ${where}>${escape(word)}</text>${line}`;
  }
  return cell === null || cell.born === 0 ? drawn : `<g class="${picture.since(cell.born)}">${drawn}</g>`;
}

/** Draw p(<bkspc>) and V(s), a column for each action; returns where they end below. */
function plot(picture, actions, left, top) {
  const width = Math.min(WIDEST, (WIDTH - MARGIN - left) / actions.length);
  const values = actions.map((action) => action.value);
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const [base, end] = [top + 18 + P_HEIGHT, left + width * actions.length];
  const legend = '<tspan class="bad">p(⌫)</tspan><tspan class="given" dx="12">V(s)</tspan>';
  picture.body.push(
    `<text class="soft" font-size="12" x="${number(left)}" y="${number(top + 8)}">${legend}</text>` +
      `<path class="axis" d="M${number(left)} ${number(base)}H${number(end)}"/>`,
  );
  let before = null;
  actions.forEach((action, place) => {
    const x = left + (place + 1 - 0.5) * width;
    const p = base - P_HEIGHT * action.bkspc_prob;
    const v = base + GAP + V_HEIGHT * (1 - (high > low ? (action.value - low) / (high - low) : 0.5));
    const body = lines(before, [x, p, v]);
    if (action.kind === "delete") {
      const zone = `x="${number(x - width / 2)}" y="${number(base - P_HEIGHT)}" width="${number(width)}"`;
      body.unshift(`<rect class="zone" ${zone} height="${P_HEIGHT + GAP + V_HEIGHT}"/>`);
    }
    const label = labelOf(action);
    if (7 * [...label].length <= width) {
      const kind = action.kind === "delete" ? "cut" : "";
      const y = number(base + GAP + V_HEIGHT + 19);
      body.push(`<text class="label ${kind}" x="${number(x)}" y="${y}">${escape(label)}</text>`);
    }
    picture.body.push(`<g class="${picture.since(place + 1)}">${body.join("")}</g>`);
    before = [x, p, v];
  });
  return base + GAP + V_HEIGHT + 22;
}

/** From the action before to this one: both curves, and a dot on each. */
function lines(before, here) {
  return ["p", "v"].flatMap((name, place) => {
    const [x, y] = [number(here[0]), number(here[place + 1])];
    const line = before && `<path class="${name}" d="M${number(before[0])} ${number(before[place + 1])}L${x} ${y}"/>`;
    return [line ?? "", `<circle class="dot ${name}" r="2.5" cx="${x}" cy="${y}"/>`];
  });
}

/** An action in a few letters. */
function labelOf(action) {
  if (action.kind === "write") return tokenName(action.token);
  return { delete: "⌫", end: "end" }[action.kind] ?? "cut";
}

/** Mood and words for what has just happened. */
function note(actions, cells, star, frame) {
  if (frame === 0) return ["soft", star ? `looks for a path to ${star.goal}` : "reads the prompt"];
  const { kind } = actions[frame - 1];
  if (kind === "write") return ["good", `writes ${nameOf(cells.find((cell) => cell.born === frame))}`];
  if (kind === "delete") {
    const gone = deletedAt(cells, frame);
    return ["bad", `deletes ${gone ? nameOf(gone) : "nothing"}`];
  }
  if (star) {
    const path = cells.filter((cell) => cell.origin !== "prompt" && stands(cell, frame)).map(nameOf);
    const isThere = star.arms.some((arm) => arm.join(" ") === path.join(" ")) && path.at(-1) === star.goal;
    return isThere ? ["good", `found ${star.goal}`] : ["bad", `ended, but not at ${star.goal}`];
  }
  return kind === "end" ? ["good", "ends"] : ["soft", "is cut: no room left"];
}

function nameOf(cell) {
  return tokenName(cell.token);
}

/** Text as XML, without the characters that XML can't hold. */
function escape(text) {
  const held = text.toWellFormed().replace(/[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff]/g, "\ufffd");
  return held.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
}

/** A coordinate as text: one digit after the point, halves go up. */
function number(x) {
  return String(Math.floor(10 * x + 0.5) / 10);
}
