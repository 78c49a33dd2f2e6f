// The settings of one lane: a form, and the request that it stands for.

import { copyOf } from "./dom.js";

/** How a path is searched for, how text is sampled, and what happens to a model that may not delete. */
const SEARCHING = { temperature: 0, top_p: 1, backspace_bias: 0, search: true, ban_deleted: false };
const SAMPLING = { temperature: 0.7, top_p: 1, backspace_bias: 0, search: false, ban_deleted: true, max_tokens: 48 };
const NEVER_DELETING = { search: false, backspace_bias: -20, ban_deleted: false };

/** A form of settings inside `root`; `onChange` is called after a change by hand. */
export function createSettings(root, heading, onChange) {
  const form = copyOf("settings-template");
  form.querySelector("legend").textContent = heading;
  root.append(form);
  const fields = form.elements;
  const touched = new Set();

  const refresh = () => {
    for (const shown of form.querySelectorAll("[data-value]")) shown.textContent = fields[shown.dataset.value].value;
    const isGreedy = Number(fields.temperature.value) === 0;
    fields.top_p.disabled = isGreedy;
    fields.ban_deleted.disabled = fields.search.checked;
  };
  form.addEventListener("input", (event) => {
    touched.add(event.target.name);
    refresh();
    onChange(event.target.name);
  });
  form.addEventListener("submit", (event) => event.preventDefault());

  const settings = {
    form,
    get model() {
      return fields.model.value;
    },
    /** Offer these models. */
    offer(names) {
      const before = fields.model.value;
      fields.model.replaceChildren(...names.map((name) => new Option(name.split("/").at(-1), name)));
      if (names.includes(before)) fields.model.value = before;
      fields.model.closest("label").hidden = names.length < 2;
      refresh();
    },
    /** What suits a prompt: search in a graph, sampling elsewhere; and what the server advises. */
    suit(star, advice = {}) {
      settings.set({ ...(star ? { ...SEARCHING, max_tokens: longestArm(star) } : SAMPLING), ...advice });
      touched.clear();
    },
    /** The length of an answer follows the graph, until somebody sets it by hand. */
    fit(star) {
      if (!touched.has("max_tokens")) settings.set({ max_tokens: longestArm(star) });
    },
    /** The same settings without the power to delete. */
    forbidDeleting() {
      settings.set(NEVER_DELETING);
    },
    set(values) {
      for (const [name, value] of Object.entries(values)) {
        if (value === undefined || !fields[name]) continue;
        if (name === "model" && ![...fields.model.options].some((option) => option.value === value)) continue;
        if (fields[name].type === "checkbox") fields[name].checked = Boolean(value);
        else fields[name].value = value;
      }
      refresh();
    },
    get values() {
      return {
        model: fields.model.value,
        temperature: Number(fields.temperature.value),
        top_p: Number(fields.top_p.value),
        max_tokens: Number(fields.max_tokens.value),
        backspace_bias: Number(fields.backspace_bias.value),
        search: fields.search.checked,
        ban_deleted: fields.ban_deleted.checked,
      };
    },
    /** The request for a prompt. A setting that would be ignored is left out: the server refuses it. */
    request(prompt, seed) {
      const { model, temperature, top_p, max_tokens, backspace_bias, search, ban_deleted } = settings.values;
      const request = { model, prompt, max_tokens, temperature, search, alternatives: 5 };
      if (temperature > 0) {
        request.seed = seed;
        if (top_p < 1) request.top_p = top_p;
      }
      if (backspace_bias) request.backspace_bias = backspace_bias;
      if (ban_deleted && !search) request.ban_deleted = true;
      return request;
    },
  };
  refresh();
  return settings;
}

/** A request's settings for the form. */
export function valuesOf(request) {
  const { model, temperature = 1, top_p = 1, max_tokens, backspace_bias = 0 } = request;
  const [search, ban_deleted] = [Boolean(request.search), Boolean(request.ban_deleted)];
  return { model, temperature, top_p, max_tokens, backspace_bias, search, ban_deleted };
}

/** A request's settings in a few words. */
export function inShort(request) {
  const words = [request.model?.split("/").at(-1) ?? "model"];
  if (request.search) words.push("search");
  if (request.temperature === 0) words.push(request.search ? "" : "greedy");
  else words.push(`temperature ${request.temperature ?? 1}`);
  if ((request.backspace_bias ?? 0) <= -20) words.push("never deletes");
  else if (request.backspace_bias) words.push(`⌫ bias ${request.backspace_bias > 0 ? "+" : "−"}${Math.abs(request.backspace_bias)}`);
  return words.filter(Boolean).join(" · ");
}

function longestArm(star) {
  return Math.max(...star.arms.map((arm) => arm.length));
}
