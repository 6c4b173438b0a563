// Starts the page: views, colours, the key, and the stream of snapshots that the pipeline shows.

import { announce, byId, say, show } from "./dom.js";
import { askAgain, follow, onKeyNeeded, requestKey } from "./net.js";
import { Pipeline } from "./pipeline.js";

const VIEWS = { pipeline: "Pipeline", requests: "Requests", playground: "Playground", figures: "Figures" };
const loaded = {};
const LOADERS = {
  requests: () => import("./requests.js"),
  playground: () => import("./playground.js"),
  figures: () => import("./figures.js"),
};

// ---- colours -------------------------------------------------------------------------------------------------------

const THEMES = { "": "as the system", light: "light", dark: "dark" };

function setTheme(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
  byId("theme").setAttribute("aria-label", `Colours: ${THEMES[theme]}`);
  byId("theme").title = `Colours: ${THEMES[theme]}`;
  document.dispatchEvent(new Event("themechange"));
}

function startTheme() {
  let theme = localStorage.getItem("triptych-theme");
  if (!(theme in THEMES)) theme = "";
  setTheme(theme);
  byId("theme").addEventListener("click", () => {
    const names = Object.keys(THEMES);
    theme = names[(names.indexOf(theme) + 1) % names.length];
    localStorage.setItem("triptych-theme", theme);
    setTheme(theme);
    announce(`Colours: ${THEMES[theme]}`);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => document.dispatchEvent(new Event("themechange")));
}

// ---- the key -------------------------------------------------------------------------------------------------------

function askForKey(wasWrong) {
  const dialog = byId("key-dialog");
  const input = byId("key-input");
  show(byId("key-button"), true);
  say(byId("key-title"), wasWrong ? "The service refused that API key" : "This service asks for an API key");
  input.value = "";
  dialog.showModal();
  input.focus();
  return new Promise((resolve) => {
    const end = (key) => {
      byId("key-form").onsubmit = byId("key-cancel").onclick = dialog.oncancel = null;
      dialog.close();
      resolve(key);
    };
    byId("key-form").onsubmit = (event) => {
      event.preventDefault();
      end(input.value.trim());
    };
    byId("key-cancel").onclick = () => end(null);
    dialog.oncancel = () => end(null);
  });
}

// ---- views ---------------------------------------------------------------------------------------------------------

async function route(first = false) {
  const [name, ...rest] = location.hash.slice(1).split("/");
  if (name === "main") return;
  const view = name in VIEWS ? name : "pipeline";
  for (const other of Object.keys(VIEWS)) show(byId(other), other === view);
  for (const link of document.querySelectorAll("nav a")) {
    if (link.dataset.view === view) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = `${VIEWS[view]} · Triptych`;
  for (const [other, module] of Object.entries(loaded)) if (other !== view) module.leave();
  if (!first) byId(`${view}-title`).focus({ preventScroll: true });
  if (!(view in LOADERS)) return;
  const module = await LOADERS[view]();
  loaded[view] = module;
  if (!byId(view).hidden) module.enter(unescaped(rest.join("/")));
}

function unescaped(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

// ---- the stream ----------------------------------------------------------------------------------------------------

const STATES = { connecting: "connecting", live: "live", paused: "paused", broken: "disconnected", refused: "no access" };
const REFUSALS = {
  401: "The live view needs an API key.",
  403: "This service shows its live view only on the machine it runs on, or with an API key.",
  404: "This service has its live view turned off.",
};

function startStream() {
  const pipeline = new Pipeline();
  let shown = "";
  const stream = follow(
    (snapshot) => pipeline.show(snapshot),
    (state, text, status) => {
      if (shown === state + text) return;
      shown = state + text;
      const connection = byId("connection");
      connection.dataset.state = state;
      say(connection, STATES[state]);
      const bad = state === "broken" || state === "refused";
      say(byId("notice-text"), state === "broken" ? `The live view has stopped: ${text}.` : [REFUSALS[status], text].filter(Boolean).join(" "));
      say(byId("notice-button"), status === 401 ? "Enter the key" : "Try again");
      show(byId("notice"), bad);
      pipeline.setStale(state !== "live", bad);
    },
  );
  byId("notice-button").addEventListener("click", () => {
    askAgain();
    stream.retry();
  });
  byId("key-button").addEventListener("click", async () => {
    askAgain();
    if (await requestKey(false)) stream.retry();
  });
}


startTheme();
onKeyNeeded(askForKey);
addEventListener("hashchange", () => route());
route(true);
startStream();
