// The page as a whole: prompt, lanes, clock, settings, sharing.

import { examples, models, useKey } from "./api.js";
import { createLane } from "./lane.js";
import { createPlayer } from "./player.js";
import { recording } from "./recording.js";
import { createSettings, valuesOf } from "./settings.js";
import { download, fileOf, linkOf, runsOfFile, runsOfLink } from "./share.js";
import { randomPrompt, readStar } from "./star.js";
import { switchTheme } from "./theme.js";

const $ = (id) => document.getElementById(id);
const narrow = matchMedia("(max-width: 899px)");
const lanes = [];
const settings = [];
let offered = [];
let names = [];
const player = createPlayer(refresh);

// The clock

function refresh() {
  for (const lane of lanes) lane.show(player.step);
  $("scrubber").max = player.length;
  $("scrubber").value = player.step;
  $("scrubber").setAttribute("aria-valuetext", `step ${player.step} of ${player.length}`);
  $("position").textContent = `${player.step} / ${player.length}`;
  $("play").setAttribute("aria-label", player.isPlaying ? "Pause" : "Play");
  $("play").classList.toggle("playing", player.isPlaying);
  const isRunning = lanes.some((lane) => lane.isRunning);
  $("run").textContent = isRunning ? "Stop" : "Run";
  const isEmpty = lanes.every((lane) => !lane.run.actions.length);
  // Without chance there is nothing to seed.
  for (const id of ["seed", "dice"]) $(id).disabled = settings.every((one) => one.values.temperature === 0);
  for (const id of ["share", "save", "play", "previous", "next", "scrubber"]) $(id).disabled = isEmpty;
}

function grow() {
  player.grow(Math.max(0, ...lanes.map((lane) => lane.run.actions.length)), lanes.some((lane) => lane.isRunning));
}

$("play").addEventListener("click", player.toggle);
$("previous").addEventListener("click", () => player.seek(player.step - 1));
$("next").addEventListener("click", () => player.seek(player.step + 1));
$("scrubber").addEventListener("input", () => player.seek(Number($("scrubber").value)));
$("speed").addEventListener("change", () => player.setSpeed(Number($("speed").value)));
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, textarea, select, button, summary")) return;
  const actions = {
    ArrowLeft: () => player.seek(player.step - 1),
    ArrowRight: () => player.seek(player.step + 1),
    Home: () => player.seek(0),
    End: () => player.seek(player.length),
    " ": player.toggle,
  };
  if (!actions[event.key]) return;
  event.preventDefault();
  actions[event.key]();
});

// Lanes and their settings

function addLane() {
  const number = lanes.length;
  const made = createSettings($("settings-forms"), number ? "Second run" : "First run", (name) => {
    if (name === "model" && !number) modelChanged().then(run, complain);
    refresh();
  });
  made.offer(names);
  settings.push(made);
  lanes.push(
    createLane($("lanes"), {
      onStep: player.seek,
      onBegin: () => {
        player.restart();
        grow();
      },
      onGrow: grow,
      onRecord: (run) => {
        download("sequencematch.svg", "image/svg+xml", recording(run));
        say("Saved the animation as sequencematch.svg.");
      },
      keepsDeleted: () => $("keep").checked,
    }),
  );
  document.body.classList.toggle("comparing", lanes.length === 2);
}

function compare(isWanted) {
  $("compare").checked = isWanted;
  if (isWanted && lanes.length === 1) {
    addLane();
    settings[1].set(settings[0].values);
    const other = names.find((name) => name !== settings[0].model);
    if (settings[0].values.backspace_bias > -20) settings[1].forbidDeleting();
    else if (other) settings[1].set({ model: other });
  } else if (!isWanted && lanes.length === 2) {
    lanes.pop().remove();
    settings.pop().form.remove();
    document.body.classList.remove("comparing");
  }
  for (const lane of lanes) lane.resize();
  grow();
}

async function run() {
  const [prompt, seed] = [$("prompt").value, Number($("seed").value) || 0];
  for (const lane of lanes) lane.forget();
  forgetLink();
  if (narrow.matches) scrollTo({ top: 0, behavior: "smooth" }); // where the runs are
  await Promise.all(lanes.map((lane, number) => lane.start(settings[number].request(prompt, seed))));
}

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  if (lanes.some((lane) => lane.isRunning)) for (const lane of lanes) lane.stop();
  else run();
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("composer").requestSubmit();
});
$("prompt").addEventListener("input", () => {
  $("example").value = "";
  const star = readStar($("prompt").value);
  if (!star) return;
  for (const one of settings) one.fit(star);
  for (const lane of lanes) lane.preview($("prompt").value);
});
$("compare").addEventListener("change", () => {
  compare($("compare").checked);
  if ($("compare").checked) run();
});
$("keep").addEventListener("change", refresh);
$("dice").addEventListener("click", () => {
  $("seed").value = Math.floor(Math.random() * 1e6);
  run();
});
$("example").addEventListener("change", () => {
  const chosen = offered[Number($("example").value)];
  if (!chosen) return;
  $("prompt").value = chosen.prompt;
  run();
});
$("new-graph").addEventListener("click", () => {
  const stars = offered.flatMap((example) => (example.star ? [example.star] : []));
  const known = new Set(stars.flatMap((star) => [star.centre, ...star.arms.flat()]));
  $("prompt").value = randomPrompt(stars[0], [...known]);
  $("example").value = "";
  run();
});

/** Offer the examples of the first lane's model, and settings that suit them. */
async function modelChanged() {
  offered = await examples(settings[0].model);
  const choices = offered.map((example, number) => new Option(titleOf(example, number), String(number)));
  $("example").replaceChildren(new Option("your own", ""), ...choices);
  $("example").value = offered.length ? "0" : "";
  const star = offered.find((example) => example.star)?.star ?? null;
  $("new-graph").hidden = !star;
  for (const one of settings) one.suit(star, offered[0]?.settings);
  if (lanes.length === 2) settings[1].forbidDeleting();
  if (offered.length) $("prompt").value = offered[0].prompt;
}

function titleOf(example, number) {
  const { title, star, prompt } = example;
  return title ?? (star ? `Graph ${number + 1}` : prompt);
}

// Sharing

function say(words) {
  $("status").textContent = words;
}

function forgetLink() {
  $("link-row").hidden = true;
  say("");
  if (location.hash) history.replaceState(null, "", location.pathname + location.search);
}

async function load(runs) {
  compare(runs.length === 2);
  runs.forEach((found, number) => settings[number].set(valuesOf(found.request)));
  const { prompt, seed } = runs[0].request;
  $("prompt").value = typeof prompt === "string" ? prompt : "";
  const place = offered.findIndex((example) => example.prompt === prompt);
  $("example").value = place < 0 ? "" : String(place);
  if (seed !== undefined) $("seed").value = seed;
  for (const lane of lanes) lane.forget();
  if (runs.every((found) => found.actions.length)) runs.forEach((found, number) => lanes[number].load(found));
  else await Promise.all(runs.map((found, number) => lanes[number].start(found.request)));
}

$("share").addEventListener("click", async () => {
  try {
    const link = await linkOf(lanes.map((lane) => lane.run));
    history.replaceState(null, "", link);
    $("link").value = link;
    $("link-row").hidden = false;
    $("link").select();
    await navigator.clipboard.writeText(link).then(() => say("Copied the link."), () => say("Here is the link."));
  } catch (error) {
    say(error.message);
  }
});
$("save").addEventListener("click", () => {
  download("sequencematch.json", "application/json", fileOf(lanes.map((lane) => lane.run)));
  say("Saved the run as sequencematch.json.");
});
$("open").addEventListener("click", () => $("file").click());
$("file").addEventListener("change", async () => {
  try {
    await load(runsOfFile(await $("file").files[0].text()));
    say("Opened the saved run.");
  } catch (error) {
    say(error.message);
  }
  $("file").value = "";
});

// The start

function complain(fault) {
  $("notice").hidden = false;
  $("fault").textContent = fault.message;
  $("key-form").hidden = fault.status !== 401;
  $("retry").hidden = fault.status === 401;
}

async function begin() {
  $("notice").hidden = true;
  try {
    names = await models();
    for (const one of settings) one.offer(names);
    await modelChanged();
  } catch (fault) {
    complain(fault);
  }
  let linked = null;
  let problem = "";
  try {
    linked = await runsOfLink(location.hash);
  } catch (error) {
    problem = error.message;
  }
  if (linked) load(linked);
  else if ($("notice").hidden && offered.length) run();
  if (problem) say(problem); // a run has cleared what was said before
}

$("retry").addEventListener("click", begin);
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey($("key").value);
  begin();
});
addEventListener("hashchange", async () => {
  const runs = await runsOfLink(location.hash).catch((error) => say(error.message));
  if (runs) await load(runs);
});
addEventListener("resize", () => lanes.forEach((lane) => lane.resize()));
switchTheme($("theme"));
if (matchMedia("(prefers-reduced-motion: reduce)").matches) {
  $("speed").value = "Infinity";
  player.setSpeed(Infinity);
}
$("settings").open = !narrow.matches;
addLane();
refresh();
begin();
