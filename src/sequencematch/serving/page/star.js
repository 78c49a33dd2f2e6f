// Path-star graphs: read from a prompt, drawn at random, and laid out as a star with curved arms.

/** The graph of a prompt `12 5 | 3 12 | … / 3 7 =`, or null if the prompt is not one. */
export function readStar(prompt) {
  const match = /^([^/]+)\/\s*(\S+)\s+(\S+)\s*=\s*$/.exec(typeof prompt === "string" ? prompt : "");
  if (!match) return null;
  const after = new Map();
  const starts = new Map();
  for (const edge of match[1].split("|")) {
    const names = edge.trim().split(/\s+/);
    if (names.length !== 2) return null;
    const [from, to] = names;
    if (starts.has(to)) return null; // two ways into a node: not a star
    starts.set(to, from);
    after.set(from, [...(after.get(from) ?? []), to]);
  }
  const [centre, goal] = [match[2], match[3]];
  if (!after.has(centre) || starts.has(centre)) return null;
  const arms = [];
  for (const first of after.get(centre)) {
    const arm = [first];
    while (after.has(arm.at(-1))) {
      const next = after.get(arm.at(-1));
      if (next.length !== 1) return null;
      arm.push(next[0]);
    }
    arms.push(arm);
  }
  const nodes = arms.reduce((sum, arm) => sum + arm.length, 0);
  return nodes === starts.size ? { centre, goal, arms } : null; // a part that hangs elsewhere is no arm
}

/** A random graph with the shape of another one and names from a list, as a prompt. */
export function randomPrompt(shape, names, random = Math.random) {
  const left = [...names];
  const draw = () => left.splice(Math.floor(random() * left.length), 1)[0];
  const centre = draw();
  const arms = shape.arms.map((arm) => arm.map(draw));
  const edges = arms.flatMap((arm) => arm.map((node, place) => [place ? arm[place - 1] : centre, node]));
  const order = edges.map((edge) => [random(), edge]).sort((one, other) => one[0] - other[0]);
  const goal = arms[Math.floor(random() * arms.length)].at(-1);
  return `${order.map(([, edge]) => edge.join(" ")).join(" | ")} / ${centre} ${goal} =`;
}

/** Radius of a node, distance between the nodes of an arm, and by how much each turns on. */
export const RADIUS = 19;
const STEP = 58;
const TURN = 0.15;
const MARGIN = 34;

/** Places of all nodes, `[{name, x, y, arm, place}]` with the centre first, and the size of the picture. */
export function layOut(star) {
  const first = Math.max(66, (star.arms.length * 2.6 * RADIUS) / (2 * Math.PI));
  const longest = Math.max(...star.arms.map((arm) => arm.length));
  const start = -Math.PI / 2 - (TURN * (longest - 1)) / 2;
  const nodes = [{ name: star.centre, x: 0, y: 0, arm: -1, place: -1 }];
  star.arms.forEach((arm, number) => {
    arm.forEach((name, place) => {
      const angle = start + (2 * Math.PI * number) / star.arms.length + TURN * place;
      const distance = first + STEP * place;
      nodes.push({ name, x: distance * Math.cos(angle), y: distance * Math.sin(angle), arm: number, place });
    });
  });
  const left = Math.min(...nodes.map((node) => node.x)) - MARGIN;
  const top = Math.min(...nodes.map((node) => node.y)) - MARGIN;
  const tenth = (number) => Math.floor(10 * number + 0.5) / 10;
  for (const node of nodes) Object.assign(node, { x: tenth(node.x - left), y: tenth(node.y - top) });
  const width = Math.ceil(Math.max(...nodes.map((node) => node.x)) + MARGIN);
  const height = Math.ceil(Math.max(...nodes.map((node) => node.y)) + MARGIN);
  return { nodes, width, height };
}

/** The edges of a star between places of `layOut`: pairs of indices into its nodes. */
export function edgesOf(star, nodes) {
  const index = new Map(nodes.map((node, number) => [node.name, number]));
  return star.arms.flatMap((arm) =>
    arm.map((name, place) => [index.get(place ? arm[place - 1] : star.centre), index.get(name)]),
  );
}
