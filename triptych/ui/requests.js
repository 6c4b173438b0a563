// The view of the last requests: a table with filters, and one request's waterfall.

import { byId, copyButton, h, reconcile, say, show } from "./dom.js";
import { count, dateTime, duration, plural, timeOfDay } from "./format.js";
import { address, call, getJson, hasKey } from "./net.js";
import { repeatCurl } from "./snippets.js";
import { isStage, TIMELINE } from "./stages.js";
import { fromIntervals, waterfall, whoDidWhat } from "./waterfall.js";

const EVERY = 2000; // milliseconds between two looks at the list

const rows = new Map();
let timer = 0;
let looks = 0;
let selected = "";
let model = "";
let isHere = false;
let latest = [];
const order = { by: "began", descending: true };

export function enter(id) {
  isHere = true;
  const closed = selected;
  selected = id;
  if (id) openDetail(id);
  else show(byId("detail"), false);
  if (closed && !id) [...rows.values()].find((row) => row.id === closed)?.link.focus();
  refresh(true);
}

export function leave() {
  isHere = false;
  selected = "";
  clearTimeout(timer);
}

/** What the list says about a request's status. */
function statusOf({ ended, status, error }) {
  const text = !ended ? "in flight" : status ? String(status) : "gone";
  return error ? `${text} ${error}` : text;
}

async function refresh(force = false) {
  clearTimeout(timer);
  looks += 1;
  const mine = looks;
  if (force || byId("requests-live").checked) {
    const query = new URLSearchParams({ limit: byId("filter-limit").value });
    for (const [name, id] of [["status", "filter-status"], ["stage", "filter-stage"], ["client", "filter-client"]]) {
      if (byId(id).value) query.set(name, byId(id).value);
    }
    try {
      const found = await getJson(`ui/requests?${query}`);
      if (mine !== looks) return; // the filters have changed since
      latest = found;
      addClients(found);
      draw();
    } catch (error) {
      if (mine !== looks) return;
      say(byId("requests-empty"), `The list can't be read: ${error.message}`);
      show(byId("requests-empty"), true);
    }
  }
  if (isHere && mine === looks) timer = setTimeout(refresh, EVERY);
}

/** Shows those of the latest list that match the text, in the chosen order. */
function draw() {
  const text = byId("filter-text").value.trim().toLowerCase();
  const shown = latest.filter((one) => [one.id, one.client, statusOf(one)].some((value) => value.toLowerCase().includes(text)));
  const sign = order.descending ? -1 : 1;
  shown.sort((a, b) => sign * ((a[order.by] ?? -1) - (b[order.by] ?? -1)) || b.began - a.began);
  reconcile(rows, byId("request-rows"), shown, (one) => one.id + one.began, (one) => new Row(one));
  const filtered = text || ["filter-status", "filter-stage", "filter-client"].some((id) => byId(id).value);
  say(byId("requests-empty"), shown.length ? "" : filtered ? "No request matches." : "No request yet.");
  show(byId("requests-empty"), shown.length === 0);
  say(byId("requests-count"), `${plural(shown.length, "request")} shown`);
}

function sortBy(head) {
  order.descending = order.by !== head.dataset.sort || !order.descending;
  order.by = head.dataset.sort;
  for (const other of head.parentNode.children) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", order.descending ? "descending" : "ascending");
  draw();
}

/** Offers the clients that have been seen. */
function addClients(found) {
  const select = byId("filter-client");
  const known = new Set([...select.options].map((option) => option.value));
  for (const client of new Set(found.map((one) => one.client))) {
    if (!known.has(client)) select.append(h("option", { value: client, text: client }));
  }
}

class Row {
  constructor(request) {
    this.link = h("a", { class: "id", href: `#requests/${encodeURIComponent(request.id)}`, text: request.id, title: request.id });
    this.cells = Array.from({ length: 9 }, () => h("td"));
    const [began] = this.cells;
    began.append(h("time", { datetime: new Date(request.began * 1000).toISOString(), title: dateTime(request.began), text: timeOfDay(request.began) }));
    this.status = h("span", { class: "status" });
    this.chip = h("span", { class: "chip" });
    this.cells[1].append(this.status);
    this.cells[8].append(this.chip);
    for (const index of [3, 4, 5, 6, 7]) this.cells[index].className = "number";
    this.element = h("tr", {}, began, h("th", { scope: "row" }, this.link), ...this.cells.slice(1));
    this.id = request.id;
    // the link is what keyboards and screen readers use; a mouse may take the whole row, unless it marks text
    this.element.addEventListener("click", (event) => {
      if (event.target !== this.link && getSelection().isCollapsed) this.link.click();
    });
  }

  update(request) {
    this.status.dataset.kind = request.state;
    say(this.status, statusOf(request));
    const [, , client, prompt, output, first, each, took] = this.cells;
    say(client, request.client);
    client.title = request.client;
    say(prompt, count(request.num_prompt) + (request.num_items ? ` · ${plural(request.num_items, "item")}` : ""));
    say(output, count(request.num_tokens));
    say(first, duration(request.time_to_first_token));
    say(each, duration(request.time_per_token));
    say(took, duration(request.seconds));
    this.chip.dataset.stage = isStage(request.slowest) ? request.slowest : "";
    say(this.chip, request.slowest);
    show(this.chip, request.slowest !== "");
    if (this.id === selected) this.element.setAttribute("aria-current", "true");
    else this.element.removeAttribute("aria-current");
  }
}

async function openDetail(id) {
  show(byId("detail"), true);
  byId("detail-title").focus({ preventScroll: true });
  await refreshDetail(id);
  const isBelow = getComputedStyle(byId("detail")).position !== "sticky"; // the table, on a narrow screen
  if (isBelow && isHere && selected === id) byId("detail").scrollIntoView({ block: "nearest" });
}

async function refreshDetail(id) {
  const body = byId("detail-body");
  const again = () => setTimeout(() => isHere && selected === id && refreshDetail(id), 500);
  try {
    model ||= (await getJson("v1/models")).data[0].id;
    const request = await getJson(`ui/requests/${encodeURIComponent(id)}`);
    if (selected !== id) return;
    if (!request.ended) again();
    if (request.ended || !body.contains(document.activeElement)) body.replaceChildren(...detailOf(request)); // which would lose the focus
  } catch (error) {
    if (selected !== id) return;
    if (error.status !== 404) again();
    body.replaceChildren(h("p", { class: "error", text: error.status === 404 ? "This request is no longer among the last ones, or another frontend had it." : error.message }));
  }
}

function detailOf(request) {
  const fact = (name, value, kind = null) => (value === "" || value === null ? null : h("div", { class: kind }, h("dt", { text: name }), h("dd", {}, value)));
  const rows = fromIntervals(request.timeline, request.began, request.began + request.seconds);
  const curl = repeatCurl(address(""), request, model, hasKey());
  const save = h("button", { type: "button", text: "Save for Perfetto" });
  save.addEventListener("click", () => savePerfetto(request.id, save));
  const trace = request.trace_id ? copyButton(() => request.trace_id, "the trace id") : null;
  return [
    h(
      "dl",
      { class: "figures" },
      fact("Id", h("code", { text: request.id }), "long"),
      fact("Status", h("span", { class: "status", data: { kind: request.state }, text: statusOf(request) })),
      fact("Endpoint", h("code", { text: request.endpoint }), "long"),
      fact("Began", dateTime(request.began), "long"),
      fact("Took", duration(request.seconds)),
      fact("First token after", request.time_to_first_token === null ? null : duration(request.time_to_first_token)),
      fact("Each later token", request.time_per_token === null ? null : duration(request.time_per_token)),
      fact("Prompt", `${plural(request.num_prompt, "token")}${request.num_reused ? `, ${count(request.num_reused)} from the prefix cache` : ""}`),
      fact("Output", plural(request.num_tokens, "token")),
      fact("Ended by", request.finish_reason),
      fact("Client", request.client),
    ),
    rows.length ? waterfall(rows, request.seconds) : h("p", { class: "empty", text: "It has no timeline: it never reached an instance." }),
    whoDidWhat(rows),
    h(
      "div",
      { class: "detail-links" },
      rows.length ? save : null,
      request.trace_id ? h("span", {}, h("span", { class: "label", text: "Trace " }), h("code", { text: request.trace_id }), trace) : null,
      request.trace_url ? h("a", { href: request.trace_url, target: "_blank", rel: "noopener noreferrer", text: "Open its trace in a new tab" }) : null,
    ),
    h("p", { class: "label", text: "Repeat it (its content isn't kept)" }),
    h("div", { class: "snippet" }, h("pre", { tabindex: 0, text: curl }), copyButton(() => curl, "the command")),
  ].filter(Boolean);
}

/** Fetched, not linked to: a link can't send a key. */
async function savePerfetto(id, button) {
  try {
    const file = await call(`ui/requests/${encodeURIComponent(id)}/perfetto`, (response) => response.blob());
    const url = URL.createObjectURL(file);
    h("a", { href: url, download: `${id.replace(/[^\w-]/g, "_")}.perfetto.json` }).click();
    setTimeout(() => URL.revokeObjectURL(url), 10000);
  } catch (error) {
    button.textContent = error.message;
  }
}

function start() {
  for (const stage of TIMELINE) byId("filter-stage").append(h("option", { value: stage, text: stage }));
  byId("filters").addEventListener("submit", (event) => event.preventDefault());
  byId("filters").addEventListener("change", (event) => event.target.id === "filter-text" || refresh(true));
  byId("filter-text").addEventListener("input", draw);
  for (const head of document.querySelectorAll(".requests [data-sort]")) head.firstChild.addEventListener("click", () => sortBy(head));
  const close = () => (location.hash = "#requests");
  byId("detail-close").addEventListener("click", close);
  byId("detail").addEventListener("keydown", (event) => event.key === "Escape" && close());
}

start();
