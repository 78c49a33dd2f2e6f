// A run: one request, and every action that answered it. Steps count from 0, the state before the first action.

/** A run that has not begun. This is also the format of a saved file. `injected` tokens at the end of the prefix are by hand. */
export function newRun(request, injected = 0) {
  return { object: "sequencematch.run", version: 1, request, injected, start: null, actions: [], end: null };
}

/** Add one event of the stream to a run. */
export function addEvent(run, event) {
  if (event.object === "action.start") run.start = event;
  else if (event.object === "action") run.actions.push(event);
  else if (event.object === "action.end") run.end = event;
}

/**
 * Every token that ever stood in the text, in the order of writing, which is also the order of the text.
 *
 * A cell stands from step `born` until before step `died`. `below` is the cell it was written on, or null.
 */
export function cellsOf(run) {
  const cells = [];
  const stack = [];
  const push = (token, born, origin) => {
    const cell = { token, born, died: Infinity, origin, below: stack.at(-1) ?? null, number: cells.length };
    cells.push(cell);
    stack.push(cell);
  };
  for (const token of run.start?.prompt_tokens ?? []) push(token, 0, "prompt");
  for (const token of run.start?.prefix_tokens ?? []) push(token, 0, "prefix");
  run.actions.forEach((action, place) => {
    if (action.kind === "write") push(action.token, place + 1, "model");
    else if (action.kind === "delete" && stack.length) stack.pop().died = place + 1;
  });
  return cells;
}

/** Whether a cell is part of the text at a step. */
export function stands(cell, step) {
  return cell.born <= step && step < cell.died;
}

/** The cells after the prompt that stand at a step. */
export function written(cells, step) {
  return cells.filter((cell) => cell.origin !== "prompt" && stands(cell, step));
}

/** The token that the action just before `step` deleted, or null. */
export function deletedAt(cells, step) {
  return cells.find((cell) => cell.died === step) ?? null;
}

/** The request that continues a run from its state at `step`, with tokens appended to it. */
export function continued(run, cells, step, ids) {
  const room = Math.max(0, (run.request.max_tokens ?? Infinity) - ids.length);
  const kept = written(cells, step).slice(0, room);
  return { ...run.request, prefix: [...kept.map((cell) => cell.token.id), ...ids] };
}

/** The last token that was injected by hand, or null. */
export function injectedCell(run, cells) {
  return run.injected ? (cells.findLast((cell) => cell.origin === "prefix") ?? null) : null;
}

/** What an action did, in words. */
export function inWords(run, cells, step) {
  if (step === 0) {
    const injected = injectedCell(run, cells);
    if (injected) return `with ${nameOf(injected.token)} injected`;
    return run.start?.prefix_tokens?.length ? "continues from here" : "before the first token";
  }
  const action = run.actions[step - 1];
  if (action.kind === "write") return `writes ${nameOf(action.token)}`;
  if (action.kind === "delete") {
    const gone = deletedAt(cells, step);
    return gone ? `deletes ${nameOf(gone.token)}` : "deletes nothing";
  }
  return action.kind === "end" ? "ends" : "is cut: no room left";
}

/** A token's text as a name: without spaces around it; white space alone is made visible, and a token without text has its id. */
export function nameOf(token) {
  const space = token.text.replaceAll(" ", "␣").replaceAll("\n", "↵").replaceAll("\t", "⇥");
  return token.text.trim() || space || `#${token.id}`;
}

/** Raise an error unless `run` has the shape of a run; what comes from a link or a file is not trusted. */
export function checked(run) {
  const fail = (what) => {
    throw new Error(`This is not a saved run: ${what}.`);
  };
  const isToken = (token) => Number.isInteger(token?.id) && typeof token?.text === "string";
  if (typeof run?.request !== "object" || run.request === null) fail("it has no request");
  if (!["string", "object"].includes(typeof run.request.prompt)) fail("its request has no prompt");
  if (!Array.isArray(run.actions)) fail("it has no list of actions");
  if (run.start !== null && typeof run.start !== "object") fail("its start is wrong");
  for (const list of [run.start?.prompt_tokens ?? [], run.start?.prefix_tokens ?? []]) {
    if (!Array.isArray(list) || !list.every(isToken)) fail("its prompt has a wrong token");
  }
  for (const action of run.actions) {
    if (!["write", "delete", "end", "cut"].includes(action?.kind)) fail("an action has a wrong kind");
    if (action.kind === "write" && !isToken(action.token)) fail("an action has no token");
    for (const name of ["prob", "value", "bkspc_prob"]) {
      if (!Number.isFinite(action[name])) fail(`an action has no ${name}`);
    }
    if (!(action.alternatives ?? []).every((other) => isToken(other) && Number.isFinite(other.prob))) {
      fail("an action has a wrong alternative");
    }
  }
  if (run.end !== null && typeof run.end !== "object") fail("its end is wrong");
  const injected = Number.isInteger(run.injected) ? run.injected : 0;
  return { ...newRun(run.request, injected), start: run.start, actions: run.actions, end: run.end };
}
