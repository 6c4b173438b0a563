// The view of the pipeline: what is served, the verdict, the board of lanes, and what has happened.

import { announce, byId, h, reconcile, say, show, svg, tune } from "./dom.js";
import { Flow } from "./flows.js";
import { count, dateTime, duration, percent, timeOfDay } from "./format.js";
import { showFrontends } from "./frontends.js";
import { Marks } from "./marks.js";
import { lanesOf, Panel } from "./panel.js";
import { LETTERS, STAGES, TITLES, VERDICTS } from "./stages.js";

const SPEAK_EVERY = 15000; // milliseconds between two verdicts that a screen reader hears
const FIGURES_EVERY = 250; // and between two changes of figures, which are illegible faster
const VERDICT_EVERY = 1000; // and of the verdict
const ROW = 4; // pixels of a row of the board's grid
const GAP = 10; // pixels between panels
const RECENT = 30; // seconds for which an event stands beside the verdict
const LOSSES = ["lost", "failed", "restarting", "recovered"];

export class Pipeline {
  constructor() {
    this.board = new Board(byId("board"));
    this.events = new Map();
    this.newest = null;
    this.spoken = { time: 0, stage: null };
    this.latest = null;
    this.drawing = false;
  }

  /** Shows a snapshot at the browser's next chance; later ones replace it until then. */
  show(snapshot) {
    this.latest = snapshot;
    if (this.drawing) return;
    this.drawing = true;
    requestAnimationFrame(() => {
      this.drawing = false;
      this.draw(this.latest);
    });
  }

  /** Without news, the last state is shown as past; when `lost`, it isn't known. */
  setStale(stale, lost) {
    byId("pipeline").classList.toggle("stale", stale);
    if (!lost) return;
    say(byId("service-state"), "unknown: disconnected");
    byId("service-state").dataset.ready = "";
  }

  draw(snapshot) {
    this.drawService(snapshot);
    this.drawVerdict(snapshot.verdict);
    this.drawFrontend(snapshot.frontend);
    this.drawEvents(snapshot.events, snapshot.time);
    if (!byId("pipeline").hidden) this.board.update(snapshot);
  }

  drawService({ service, time }) {
    document.body.classList.toggle("kills", service.kills); // panels show their button then
    say(byId("service-model"), service.model);
    byId("service-model").title = `Triptych ${service.version}`;
    say(byId("service-topology"), service.topology || "no instance");
    say(byId("service-requests"), count(service.num_requests));
    say(byId("service-up"), duration(time - service.began));
    showFrontends(service);
    const state = byId("service-state");
    say(state, service.ready ? "ready" : `not ready: ${service.why_not}`);
    state.dataset.ready = service.ready;
  }

  drawVerdict(verdict) {
    const element = byId("verdict");
    const now = performance.now();
    if (verdict.stage === this.shownStage && now - this.verdictDrawn < VERDICT_EVERY) return;
    this.shownStage = verdict.stage;
    this.verdictDrawn = now;
    if (element.dataset.stage !== verdict.stage) element.dataset.stage = verdict.stage;
    const title = VERDICTS[verdict.stage] ?? VERDICTS[""];
    say(byId("verdict-stage"), title);
    say(byId("verdict-sentence"), withoutPrefix(verdict.sentence, `${title}: `));
    say(byId("verdict-advice"), verdict.advice);
    show(byId("verdict-advice"), verdict.advice !== "");
    if (verdict.stage !== this.spoken.stage && (now - this.spoken.time > SPEAK_EVERY || this.spoken.stage === null)) {
      this.spoken = { time: now, stage: verdict.stage };
      announce(`${verdict.sentence} ${verdict.advice}`);
    }
  }

  drawFrontend({ queued, oldest_wait, saturation, busy }) {
    const now = performance.now();
    if (now - (this.frontendDrawn ?? 0) < FIGURES_EVERY) return;
    this.frontendDrawn = now;
    say(byId("frontend-preparing"), count(queued));
    say(byId("frontend-wait"), queued && oldest_wait > 0 ? `being prepared, the first for ${duration(oldest_wait)}` : "being prepared");
    say(byId("frontend-busy"), busy ? percent(busy) : "under 10\u202f%");
    say(byId("frontend-saturation"), percent(saturation));
    tune(byId("frontend-bar"), "--share", Math.min(1, busy));
    byId("frontend-bar").setAttribute("aria-valuenow", Math.round(busy * 100));
  }

  drawEvents(events, time) {
    const last = events.reduce((found, event) => (!found || event.number > found.number ? event : found), null);
    const isRecent = last !== null && time - last.time < RECENT;
    show(byId("last-event"), isRecent);
    if (isRecent) say(byId("last-event"), `${timeOfDay(last.time)} ${last.kind}: ${last.text}`);
    byId("last-event").dataset.kind = last?.kind ?? "";
    const newest = events.reduce((most, event) => Math.max(most, event.number), -1);
    if (newest === this.newest) return;
    const news = events.filter((event) => this.newest !== null && event.number > this.newest && LOSSES.includes(event.kind));
    if (news.length) announce(news.map((event) => event.text).join(". "));
    this.newest = newest;
    const ordered = [...events].sort((a, b) => b.number - a.number);
    reconcile(this.events, byId("events"), ordered, (event) => event.number, (event) => new EventLine(event));
    show(byId("events-empty"), events.length === 0);
    show(byId("events"), events.length > 0);
  }
}

/** The title stands beside the sentence already. Names of instances, which have digits, keep their small letters. */
function withoutPrefix(sentence, prefix) {
  if (!sentence.startsWith(prefix)) return sentence;
  const rest = sentence.slice(prefix.length);
  return /^[a-z]+ /.test(rest) ? rest[0].toUpperCase() + rest.slice(1) : rest;
}

class EventLine {
  constructor(event) {
    const time = h("time", { datetime: new Date(event.time * 1000).toISOString(), title: dateTime(event.time), text: timeOfDay(event.time) });
    this.element = h("li", { data: { kind: event.kind } }, time, h("span", { class: "kind", text: event.kind }), h("span", { class: "event-text", text: event.text }));
  }

  update() {}
}

/** Lanes, queues, panels, flows and marks. */
class Board {
  constructor(element) {
    this.element = element;
    this.panels = new Map(STAGES.map((stage) => [stage, new Map()]));
    this.flows = { prefill: new Flow("embeddings"), decode: new Flow("kv") };
    this.svg = svg("svg", { class: "flows", "aria-hidden": "true" }, this.flows.prefill.group, this.flows.decode.group);
    element.append(this.svg);
    this.lanes = new Map();
    for (const stage of STAGES) {
      if (this.flows[stage]) element.append(this.flows[stage].element);
      const lane = new Lane(stage);
      this.lanes.set(stage, lane);
      element.append(lane.element);
    }
    this.marks = new Marks(element);
    this.drawn = -Infinity;
    this.dirty = true;
    new ResizeObserver(() => (this.dirty = true)).observe(element);
  }

  update({ stages, instances: all, requests }) {
    // while an instance is replaced, its successor has the same name: the one that serves is shown
    const instances = [...new Map([...all].reverse().map((one) => [one.name, one])).values()].reverse();
    const now = performance.now();
    const isDue = now - this.drawn > FIGURES_EVERY;
    if (isDue) {
      this.drawn = now;
      instances.sort((a, b) => a.name.localeCompare(b.name, "en", { numeric: true }));
      for (const stage of STAGES) {
        const view = stages.find((one) => one.name === stage);
        const members = instances.filter((one) => STAGES[lanesOf(one.role)[0]] === stage);
        const serving = instances.filter((one) => one.role.includes(LETTERS[stage]));
        const elsewhere = serving.filter((one) => !members.includes(one)).map((one) => one.name);
        if (this.lanes.get(stage).update(view, members, serving.length > 0, elsewhere)) this.dirty = true;
      }
    }
    if (this.dirty) this.measure();
    if (isDue || this.moved) {
      this.moved = false;
      for (const flow of Object.values(this.flows)) if (flow.update(instances, this.boxes)) this.dirty = true;
    }
    const roles = new Map(instances.map((one) => [one.name, one.role]));
    this.marks.update(requests, roles);
  }

  /** Remembers where everything stands: reading it at each snapshot would make the browser lay the page out each time. */
  measure() {
    this.dirty = false;
    this.moved = true;
    const panels = [...this.lanes.values()].flatMap((lane) => [...lane.panels.values()]);
    const heights = panels.map((panel) => panel.element.offsetHeight);
    panels.forEach((panel, index) => tune(panel.element, "--rows", Math.ceil((heights[index] + GAP) / ROW)));
    const origin = this.element.getBoundingClientRect();
    const box = (element) => {
      const found = element.getBoundingClientRect();
      return { x: found.left - origin.left, y: found.top - origin.top, width: found.width, height: found.height };
    };
    const trays = new Map();
    const boxes = new Map();
    for (const lane of this.lanes.values()) {
      trays.set(`queue ${lane.stage}`, lane);
      for (const [name, panel] of lane.panels) {
        trays.set(`instance ${name}`, panel);
        boxes.set(name, box(panel.element));
      }
    }
    for (const flow of Object.values(this.flows)) boxes.set(flow.element, box(flow.element));
    this.boxes = getComputedStyle(this.svg).display === "none" ? null : boxes;
    this.marks.measure(trays);
  }
}

class Lane {
  constructor(stage) {
    this.stage = stage;
    this.panels = new Map();
    this.queued = h("strong", { class: "queue-number" });
    this.wait = h("span", { class: "queue-wait" });
    this.tray = h("div", { class: "tray", "aria-hidden": "true" });
    this.overflow = h("span", { class: "overflow" });
    this.tray.append(this.overflow);
    this.queue = h("div", { class: "queue" }, h("p", {}, this.queued, this.wait), this.tray);
    this.busy = h("span", { class: "lane-value" });
    this.saturation = h("span", { class: "lane-value" });
    this.empty = h("p", { class: "empty", text: "No instance" });
    this.elsewhere = h("span", { class: "elsewhere" }); // on narrow screens, where no panel spans lanes
    const title = `lane-${stage}`;
    this.head = h(
      "header",
      { class: "lane-head" },
      h("h2", { id: title, text: TITLES[stage] }),
      h("p", { class: "lane-figures" }, h("span", {}, "busy ", this.busy), h("span", { title: "Share of the work that its instances may have which they have" }, "saturation ", this.saturation), this.elsewhere),
    );
    this.element = h("section", { class: "lane", data: { stage }, "aria-labelledby": title }, this.head, this.queue, this.empty);
  }

  /** Returns whether panels have come or gone, or the queue's text has changed in a way that moves others. */
  update(view, instances, serves, elsewhere) {
    say(this.elsewhere, elsewhere.length ? `by ${elsewhere.join(", ")}` : "");
    const queued = view?.queued ?? 0;
    say(this.queued, count(queued));
    say(this.wait, queued && view.oldest_wait > 0 ? `wait ${duration(view.oldest_wait)}` : "waiting");
    this.queue.classList.toggle("full", queued > 0);
    say(this.busy, serves ? percent(view?.busy) : "–");
    say(this.saturation, serves ? percent(view?.saturation) : "–");
    tune(this.head, "--share", Math.min(1, view?.busy ?? 0).toFixed(2));
    const was = this.empty.hidden;
    show(this.empty, !serves);
    const changed = reconcile(this.panels, this.element, instances, (one) => one.name, (one) => new Panel(one));
    return changed || was !== this.empty.hidden || this.resized();
  }

  /** Rows of a panel appear and vanish as its figures do. */
  resized() {
    const shape = [...this.panels.values()].map((panel) => panel.shape()).join();
    const changed = shape !== this.shape;
    this.shape = shape;
    return changed;
  }
}
