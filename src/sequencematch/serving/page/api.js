// The server's API: models, examples, and a completion as a stream of actions. Errors are put in kind words here.

const NO_SERVER = "The server does not answer. Is it still running? Start it with “sequencematch serve”, then try again.";
const BROKEN = "The connection broke before the run had ended. What arrived is still here.";

/** A fault that a person can read. `status` is the HTTP status, or 0 where no answer came. */
export class Fault extends Error {
  constructor(message, status = 0, retryAfter = null) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter;
  }
}

let key = sessionStorage.getItem("key") ?? "";

/** Use an API key from now on, until the tab is closed. */
export function useKey(given) {
  key = given;
  if (given) sessionStorage.setItem("key", given);
  else sessionStorage.removeItem("key");
}

/** The names of the served models. */
export async function models() {
  const found = await json("v1/models");
  return found.data.map((model) => model.id);
}

/** Which random graphs are offered: in the first one the bundled model walks into one dead end, which shows most. */
const SEED = 7;

/** Prompts to try with a model. A server without examples is no fault. */
export async function examples(model) {
  try {
    return (await json(`v1/examples?model=${encodeURIComponent(model)}&seed=${SEED}`)).data ?? [];
  } catch (fault) {
    if (fault.status === 404) return [];
    throw fault;
  }
}

/** Ask for a completion; `onEvent` is called with every event. Resolves when the stream has ended. */
export async function complete(request, onEvent, signal) {
  const body = JSON.stringify({ ...request, stream: true, stream_actions: true });
  const headers = { "Content-Type": "application/json" };
  const response = await ask("v1/completions", { method: "POST", headers, body, signal });
  let hasEnded = false;
  try {
    for await (const event of events(response.body)) {
      if (event.error) throw new Fault(event.error.message ?? "The run failed on the server.", 500);
      hasEnded ||= event.object === "action.end";
      onEvent(event);
    }
  } catch (error) {
    throw error instanceof Fault || error.name === "AbortError" ? error : new Fault(BROKEN);
  }
  if (!hasEnded) throw new Fault(BROKEN);
}

/** The ids of the tokens of a text, by the model's own tokenizer: a request of one token, dropped as soon as it has begun. */
export async function tokenize(model, text) {
  const control = new AbortController();
  const request = { model, prompt: text, max_tokens: 1, temperature: 0, alternatives: 0 };
  let found = null;
  const onEvent = (event) => {
    if (event.object === "action.start") {
      found = event.prompt_tokens;
      control.abort();
    }
  };
  try {
    await complete(request, onEvent, control.signal);
  } catch (error) {
    if (error.name !== "AbortError") throw error;
  }
  return (found ?? []).filter((token) => token.text.trim() && text.includes(token.text.trim())).map((token) => token.id);
}

async function json(path) {
  const response = await ask(path, {});
  return response.json();
}

async function ask(path, options) {
  const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    throw error.name === "AbortError" ? error : new Fault(NO_SERVER);
  }
  if (!response.ok) throw await faultOf(response);
  return response;
}

async function faultOf(response) {
  const said = await response
    .json()
    .then((body) => body.error?.message)
    .catch(() => null);
  const wait = Number(response.headers.get("Retry-After")) || null;
  const words = {
    401: "This server wants an API key.",
    429: `The server is busy: as many runs are waiting as it takes. Try again in ${wait ? `${wait} s` : "a moment"}.`,
    503: "The server is starting or stopping. Try again in a moment.",
  };
  const message = words[response.status] ?? said ?? `The server answered with status ${response.status}.`;
  return new Fault(message, response.status, wait);
}

/** The events of a stream of server-sent events, up to [DONE]. */
async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  while (true) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue;
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}
