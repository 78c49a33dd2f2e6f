// The graph of a path-star prompt, and the walk through it at a step.

import { el, svg } from "./dom.js";
import { nameOf, stands } from "./run.js";
import { edgesOf, layOut, RADIUS } from "./star.js";

/** Draw a star into `figure`. `onNode(name)` is called for a node that is clicked. Returns `show(cells, step)`. */
export function drawGraph(figure, star, onNode) {
  const { nodes, width, height } = layOut(star);
  const byName = new Map(nodes.map((node) => [node.name, node]));
  const edges = new Map();
  const ground = svg("g");
  for (const [from, to] of edgesOf(star, nodes)) {
    const line = svg("line", { class: "edge", x1: nodes[from].x, y1: nodes[from].y, x2: nodes[to].x, y2: nodes[to].y });
    edges.set(`${nodes[from].name} ${nodes[to].name}`, line);
    ground.append(line);
  }
  const jumps = svg("g");
  const walker = svg("circle", { class: "walker", r: RADIUS + 7 });
  const circles = new Map();
  const tops = nodes.map((node) => {
    const group = svg("g", { class: "node", transform: `translate(${node.x} ${node.y})` });
    if (node.name === star.goal) group.append(svg("circle", { class: "goal", r: RADIUS + 5 }));
    group.append(svg("circle", { class: "disc", r: RADIUS }));
    group.append(svg("text", {}, node.name));
    if (node.place >= 0) group.addEventListener("click", () => onNode(node.name));
    circles.set(node.name, group);
    return group;
  });
  const label = `Graph with centre ${star.centre} and ${star.arms.length} arms; the goal is ${star.goal}`;
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  picture.append(ground, jumps, walker, ...tops);
  const note = el("figcaption", { class: "graph-note" });
  figure.replaceChildren(picture, note);

  return function show(cells, step) {
    const walked = cells.filter((cell) => cell.origin !== "prompt" && cell.born <= step);
    for (const line of edges.values()) line.setAttribute("class", "edge");
    for (const group of circles.values()) group.setAttribute("class", "node");
    circles.get(star.centre).setAttribute("class", "node on");
    jumps.replaceChildren();
    // What was left first, so that what stands is drawn over it.
    for (const isStanding of [false, true]) {
      const state = isStanding ? "on" : "left";
      for (const cell of walked.filter((one) => stands(one, step) === isStanding)) {
        const name = nameOf(cell.token);
        const from = cell.below && cell.below.origin !== "prompt" ? nameOf(cell.below.token) : star.centre;
        circles.get(name)?.setAttribute("class", `node ${state}`);
        const edge = edges.get(`${from} ${name}`);
        if (edge) edge.setAttribute("class", `edge ${state}`);
        else if (byName.has(from) && byName.has(name)) jumps.append(jump(byName.get(from), byName.get(name), state));
      }
    }
    const path = walked.filter((cell) => stands(cell, step));
    const known = path.filter((cell) => byName.has(nameOf(cell.token)));
    const here = byName.get(known.length ? nameOf(known.at(-1).token) : star.centre);
    walker.style.transform = `translate(${here.x}px, ${here.y}px)`;
    circles.get(here.name).classList.add("here");
    const strange = path.find((cell) => !byName.has(nameOf(cell.token)));
    note.textContent = strange ? `${nameOf(strange.token)} is not a node of this graph` : "Click a node to put the walk there.";
    note.classList.toggle("strange", Boolean(strange));
  };
}

/** A bent line between nodes that no edge joins. */
function jump(from, to, state) {
  const bend = 0.18;
  const x = (from.x + to.x) / 2 + bend * (to.y - from.y);
  const y = (from.y + to.y) / 2 - bend * (to.x - from.x);
  return svg("path", { class: `jump ${state}`, d: `M${from.x} ${from.y}Q${x} ${y} ${to.x} ${to.y}` });
}
