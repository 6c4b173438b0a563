// The playground: ask about text and media, see the plan before and where the time went while the answer streams.

import { acceptFiles, Attachments } from "./attachments.js";
import { announce, byId, copyButton, h, say, show } from "./dom.js";
import { count, duration, plural } from "./format.js";
import { areSeveral } from "./frontends.js";
import { address, events, getJson, hasKey, newName, Patience, postJson } from "./net.js";
import { asCurl, asJavaScript, asPython } from "./snippets.js";
import { fromAnswer, fromIntervals, waterfall, whoDidWhat } from "./waterfall.js";

const PLAN_AFTER = 350; // milliseconds after the last change
const LOOK_EVERY = 250; // and between two looks at a running request's timeline
const SILENCE = 60000; // after which an answer has failed, if the service doesn't say that it is at work
const LANGUAGES = { curl: asCurl, Python: asPython, JavaScript: asJavaScript };

let model = "";
let waiting = 0;
let changes = 0;
let isPlanning = false;
let running = null;
let language = "curl";

/** Questions that were answered, in order. What is attached belongs to the first. */
let turns = [];

const attachments = new Attachments(() => {
  startAgain();
  changed();
});

export async function enter() {
  try {
    await learnModel();
  } catch (error) {
    planText(error.message, true);
  }
}

/** Asks what is served, unless that is known. */
async function learnModel() {
  if (model) return;
  const [card] = (await getJson("v1/models")).data;
  model = card.id;
  const takes = card.input_modalities ?? ["text"];
  byId("files").accept = takes.filter((one) => one !== "text").map((one) => `${one}/*`).join(",");
  show(byId("drop"), takes.length > 1);
  show(byId("sample"), takes.includes("image"));
  byId("max-tokens").max = card.max_model_len;
  drawCode();
}

export function leave() {}

/** What the form says. Of media, nothing said asks what the empty field suggests. */
function settings() {
  const suggested = attachments.list.length && !turns.length ? byId("question").placeholder : "";
  return { system: byId("system").value, question: byId("question").value || suggested, max_tokens: Number(byId("max-tokens").value) || 128, temperature: Number(byId("temperature").value) || 0 };
}

function body(parts = attachments.parts(), { system, question, ...rest } = settings(), earlier = turns) {
  const said = [...earlier, { question, answer: null }].flatMap((turn) => [
    { role: "user", content: turn.question },
    { role: "assistant", content: turn.answer },
  ]);
  said.pop(); // the answer to come
  if (parts.length) said[0].content = [...parts, { type: "text", text: said[0].content }];
  const first = system ? [{ role: "system", content: system }] : [];
  return { model, messages: [...first, ...said], ...rest, stream: true };
}

function startAgain() {
  turns = [];
  byId("turns").replaceChildren();
  show(byId("again"), false);
}

// ---- before --------------------------------------------------------------------------------------------------------

function changed() {
  drawCode();
  changes += 1;
  clearTimeout(waiting);
  waiting = setTimeout(plan, PLAN_AFTER);
}

function planText(text, isError = false) {
  const element = byId("plan");
  say(element, text);
  element.classList.toggle("error", isError);
}

/** Shows what becomes of the prompt. One request at a time, so that media are under way once. */
async function plan() {
  if (isPlanning) return;
  isPlanning = true;
  let seen;
  do {
    seen = changes;
    await planOnce(() => seen === changes);
  } while (seen !== changes);
  isPlanning = false;
}

async function planOnce(isCurrent) {
  if (!attachments.list.length && !byId("question").value) return planText("");
  try {
    await learnModel();
    const found = await attachments.sendOnce((parts, hasThem) => {
      const { stream: _, ...request } = body(parts);
      return postJson("v1/plan", request, (response) => {
        hasThem();
        return response.json();
      });
    });
    if (!isCurrent()) return;
    attachments.setPlans(found.data);
    const media = found.data.reduce((sum, item) => sum + item.tokens, 0);
    const refusal = found.admission.error;
    planText(`The prompt will have ${plural(found.prompt_tokens, "token")}${media ? `, ${count(media)} of them media` : ""}.${refusal ? ` It can't be answered now: ${refusal.message}.` : ""}`, Boolean(refusal));
  } catch (error) {
    if (isCurrent()) planText(error.message, true);
  }
}

/** The request to come or, while nothing more is asked, the last one. */
function shownBody() {
  const said = settings();
  if (said.question || !turns.length) return body();
  return body(attachments.parts(), { ...said, question: turns.at(-1).question }, turns.slice(0, -1));
}

function drawCode() {
  const files = attachments.list.map(({ name, kind }) => ({ name, kind }));
  const code = LANGUAGES[language](address(""), shownBody(), files, hasKey());
  byId("code-panel").replaceChildren(h("div", { class: "snippet" }, h("pre", { tabindex: 0, "aria-label": `The request in ${language}`, text: code }), copyButton(() => code, "the code")));
}

function startTabs() {
  const tabs = byId("code-tabs");
  const select = (name, focus) => {
    language = name;
    for (const tab of tabs.children) {
      const isOn = tab.textContent === name;
      tab.setAttribute("aria-selected", isOn);
      tab.tabIndex = isOn ? 0 : -1;
      if (isOn) byId("code-panel").setAttribute("aria-labelledby", tab.id);
      if (isOn && focus) tab.focus();
    }
    drawCode();
  };
  const names = Object.keys(LANGUAGES);
  names.forEach((name) => {
    const tab = h("button", { type: "button", role: "tab", id: `code-${name}`, "aria-controls": "code-panel", text: name, on: { click: () => select(name, false) } });
    tabs.append(tab);
  });
  tabs.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (step) select(names[(names.indexOf(language) + step + names.length) % names.length], true);
  });
  select(language, false);
}

// ---- while it runs -------------------------------------------------------------------------------------------------

async function send() {
  if (running) return;
  if (turns.length && !byId("question").value) return byId("question").focus();
  const mine = { id: newName(), patience: new Patience(SILENCE), began: performance.now(), first: null, usage: null, timeline: null, looking: null, wasStopped: false };
  const stopped = new Promise((resolve) => (mine.stop = resolve));
  running = mine;
  begin();
  const asked = settings();
  mine.question = asked.question;
  const answered = async () => {
    await learnModel();
    await attachments.sendOnce((parts, hasThem) => ask(mine, body(parts, asked), hasThem));
  };
  try {
    await Promise.race([stopped, answered()]);
  } catch (error) {
    if (!mine.wasStopped) fail(error.message);
  }
  mine.patience.stop();
  mine.ended = performance.now();
  running = null;
  finish(mine);
}

function ask(mine, body, hasThem) {
  mine.looking ??= look(mine);
  const request = { ...body, stream_options: { include_usage: true } };
  const read = async (response) => {
    hasThem();
    for await (const data of events(response)) {
      if (mine.wasStopped || data === "[DONE]") return;
      mine.patience.heard();
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      take(mine, chunk);
    }
    throw new Error("the answer has broken off");
  };
  return postJson("v1/chat/completions", request, read, { headers: { "X-Triptych-Timeline": "true", "X-Request-ID": mine.id }, patience: mine.patience });
}

function stop() {
  if (!running) return;
  running.wasStopped = true;
  running.patience.abort(new Error("stopped"));
  running.stop();
}

/** The last answer becomes a turn of the conversation, once there is another question. */
function begin() {
  if (turns.length) {
    const { question, answer } = turns.at(-1);
    byId("turns").append(h("li", {}, h("strong", { text: question }), h("p", { text: answer })));
  }
  say(byId("answer-text"), "");
  say(byId("reasoning"), "");
  for (const id of ["reasoning", "answer-error", "answer-empty"]) show(byId(id), false);
  byId("answer-waterfall").replaceChildren();
  byId("answer-text").classList.add("streaming");
  byId("send").setAttribute("aria-disabled", true); // not disabled, which would lose the focus
  show(byId("stop"), true);
  say(byId("answer-state"), "waiting for the first token");
}

function take(mine, chunk) {
  const delta = chunk.choices?.[0]?.delta ?? {};
  if (delta.content || delta.reasoning) {
    mine.first ??= performance.now();
    say(byId("answer-state"), "answering");
  }
  if (delta.reasoning) {
    byId("reasoning").append(delta.reasoning);
    show(byId("reasoning"), true);
  }
  if (delta.content) byId("answer-text").append(delta.content);
  mine.usage = chunk.usage ?? mine.usage;
  mine.timeline = chunk.timeline ?? mine.timeline;
}

function fail(message) {
  say(byId("answer-error"), message);
  show(byId("answer-error"), true);
}

/** Shows the timeline so far, again and again, until the request has ended. */
async function look(mine) {
  while (running === mine) {
    await new Promise((resolve) => setTimeout(resolve, LOOK_EVERY));
    if (running !== mine) return;
    try {
      const request = await getJson(`ui/requests/${mine.id}`);
      if (running !== mine) return;
      if (!request.ended) mine.patience.heard();
      drawWaterfall(mine, fromIntervals(request.timeline, request.began, request.began + request.seconds), request.seconds);
    } catch (error) {
      // it hasn't arrived yet, has just ended, or is at another frontend, which this connection doesn't lead to
      if (error.status === 404 && areSeveral()) mine.patience.heard();
    }
  }
}

function drawWaterfall(mine, rows, seconds) {
  if (!rows.length) return;
  byId("answer-waterfall").replaceChildren(...[figuresOf(mine), waterfall(rows, seconds), whoDidWhat(rows)].filter(Boolean));
}

function figuresOf(mine) {
  const fact = (name, value) => h("div", {}, h("dt", { text: name }), h("dd", { text: value }));
  const tokens = mine.usage?.completion_tokens;
  const facts = [];
  if (mine.first !== null) facts.push(fact("First token after", duration((mine.first - mine.began) / 1000)));
  const decode = mine.timeline?.filter((one) => one.stage === "decode").reduce((sum, one) => sum + one.end_ms - one.start_ms, 0);
  if (tokens > 1 && decode) facts.push(fact("Each later token", duration(decode / 1000 / (tokens - 1))));
  if (mine.ended) facts.push(fact("Took", duration((mine.ended - mine.began) / 1000)));
  if (mine.usage) {
    facts.push(fact("Prompt", plural(mine.usage.prompt_tokens, "token")), fact("Output", plural(tokens, "token")));
    const cached = mine.usage.prompt_tokens_details?.cached_tokens;
    if (cached) facts.push(fact("From the prefix cache", plural(cached, "token")));
  }
  return h("dl", { class: "figures answer-figures" }, ...facts);
}

function finish(mine) {
  const { wasStopped } = mine;
  byId("answer-text").classList.remove("streaming");
  byId("send").removeAttribute("aria-disabled");
  if (document.activeElement === byId("stop")) byId("send").focus();
  show(byId("stop"), false);
  const failed = !byId("answer-error").hidden;
  say(byId("answer-state"), wasStopped ? "stopped" : failed ? "failed" : "complete");
  if (mine.timeline) drawWaterfall(mine, fromAnswer(mine.timeline), (mine.ended - mine.began) / 1000);
  if (!failed && !wasStopped) {
    turns.push({ question: mine.question, answer: byId("answer-text").textContent });
    byId("question").value = "";
    show(byId("again"), true);
    changed();
  }
  if (!failed) announce(wasStopped ? "Stopped" : `Answer: ${byId("answer-text").textContent}`);
  byId("answer-waterfall").append(h("p", {}, h("a", { href: `#requests/${mine.id}`, text: "See it among the requests" })));
}

function start() {
  acceptFiles(attachments, byId("playground"));
  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  byId("composer").addEventListener("keydown", (event) => event.key === "Enter" && (event.ctrlKey || event.metaKey) && send());
  byId("stop").addEventListener("click", stop);
  byId("again").addEventListener("click", () => {
    startAgain();
    changed();
    byId("question").focus();
  });
  byId("sample").addEventListener("click", async () => attachments.add([await samplePicture()]));
  for (const id of ["question", "system", "max-tokens", "temperature"]) byId(id).addEventListener("input", changed);
  startTabs();
}

/** Three shapes, drawn here: the demo model knows them, and so does any other. */
async function samplePicture() {
  const canvas = h("canvas", { width: 224, height: 224 });
  const draw = canvas.getContext("2d");
  const filled = (style, path) => {
    draw.fillStyle = style;
    draw.beginPath();
    path();
    draw.fill();
  };
  filled("white", () => draw.rect(0, 0, 224, 224));
  filled("red", () => draw.arc(62, 66, 40, 0, 2 * Math.PI));
  filled("blue", () => draw.rect(124, 30, 72, 72));
  filled("green", () => [[112, 126], [160, 204], [64, 204]].forEach(([x, y]) => draw.lineTo(x, y)));
  return new File([await new Promise((resolve) => canvas.toBlob(resolve))], "sample.png", { type: "image/png" });
}

start();
