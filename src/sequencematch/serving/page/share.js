// Runs as a link and as a file. A link holds them in its fragment, which browsers do not send to a server.

import { checked } from "./run.js";

/** The longest fragment of a link that programs pass on unharmed, and the most text that one may unpack to. */
const LONGEST = 8000;
const MOST_BYTES = 4_000_000;

/** Runs as a link: with all actions if they fit, else with the requests alone. */
export async function linkOf(runs, address = location.href) {
  const base = address.split("#")[0];
  const whole = await packed({ runs: runs.map(slim) });
  if (whole.length <= LONGEST) return `${base}#run=${whole}`;
  const asked = await packed({ runs: runs.map((run) => ({ request: run.request, start: null, actions: [], end: null })) });
  if (asked.length <= LONGEST) return `${base}#run=${asked}`;
  throw new Error("This prompt is too long for a link. Save the run as a file instead.");
}

/** The runs of a link, or null if it holds none. */
export async function runsOfLink(fragment) {
  const match = /^#run=([\w-]+)$/.exec(fragment);
  if (!match) return null;
  let found;
  try {
    found = JSON.parse(await unpacked(match[1]));
  } catch {
    throw new Error("This link is damaged: it does not hold a whole run.");
  }
  return runsIn(found);
}

/** Runs as the text of a file. */
export function fileOf(runs) {
  return `${JSON.stringify({ object: "sequencematch.runs", version: 1, runs }, null, 1)}\n`;
}

/** The runs of a file. */
export function runsOfFile(text) {
  let found;
  try {
    found = JSON.parse(text);
  } catch {
    throw new Error("This is not a saved run: the file is not JSON.");
  }
  return runsIn(found);
}

/** Let the browser save a text as a file. */
export function download(name, type, text) {
  const address = URL.createObjectURL(new Blob([text], { type }));
  const link = Object.assign(document.createElement("a"), { href: address, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(address), 60_000);
}

function runsIn(found) {
  const runs = Array.isArray(found?.runs) ? found.runs : [found];
  if (!runs.length || runs.length > 2) throw new Error("This is not a saved run: it must hold one or two runs.");
  return runs.map(checked);
}

/** A run without what can be told from the rest, and numbers with four digits after the point. */
function slim(run) {
  const round = (number) => Math.round(1e4 * number) / 1e4;
  const actions = run.actions.map(({ kind, token, prob, value, bkspc_prob, alternatives = [] }, step) => ({
    object: "action",
    step,
    kind,
    token,
    prob: round(prob),
    value: round(value),
    bkspc_prob: round(bkspc_prob),
    alternatives: alternatives.map((other) => ({ ...other, prob: round(other.prob) })),
  }));
  return { request: run.request, injected: run.injected, start: run.start, actions, end: run.end };
}

async function packed(value) {
  const bytes = new TextEncoder().encode(JSON.stringify(value));
  const deflated = await through(bytes, new CompressionStream("deflate-raw"), Infinity);
  let text = "";
  for (const byte of deflated) text += String.fromCharCode(byte);
  return btoa(text).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
}

async function unpacked(text) {
  const binary = atob(text.replaceAll("-", "+").replaceAll("_", "/"));
  const bytes = Uint8Array.from(binary, (character) => character.charCodeAt(0));
  return new TextDecoder().decode(await through(bytes, new DecompressionStream("deflate-raw"), MOST_BYTES));
}

/** Bytes sent through a stream; an error if more than `most` come out. */
async function through(bytes, stream, most) {
  const reader = new Blob([bytes]).stream().pipeThrough(stream).getReader();
  const parts = [];
  let size = 0;
  while (true) {
    const { value, done } = await reader.read();
    if (done) break;
    size += value.length;
    if (size > most) throw new Error("too large");
    parts.push(value);
  }
  return new Uint8Array(await new Blob(parts).arrayBuffer());
}
