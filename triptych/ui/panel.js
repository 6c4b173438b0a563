// The panel of one instance.

import { announce, h, reconcile, say, show, svg, tune } from "./dom.js";
import { bytes, count, duration, percent, rate } from "./format.js";
import { call } from "./net.js";
import { LETTERS, STAGES, stagesOf } from "./stages.js";

const HISTORY = 60; // seconds of busy share that the curve shows

const STATES = {
  serving: "serving",
  ready: "serving",
  starting: "starting",
  restarting: "restarting",
  failed: "failed",
  draining: "draining",
};

export class Panel {
  constructor(instance) {
    this.history = [];
    this.sampled = 0;
    this.pools = new Map();
    this.name = h("h3", { text: instance.name });
    this.badges = h("span", { class: "badges" });
    this.state = h("span", { class: "state" });
    this.busy = h("span", { class: "busy-value" });
    this.line = svg("path", { class: "curve-line" });
    this.area = svg("path", { class: "curve-area" });
    this.meter = h("div", { class: "bar", role: "meter", "aria-label": "Busy share", "aria-valuemin": 0, "aria-valuemax": 100 }, h("i"));
    this.figures = h("dl", { class: "figures" });
    this.values = new Map();
    this.tray = h("div", { class: "tray", "aria-hidden": "true" });
    this.overflow = h("span", { class: "overflow" });
    this.tray.append(this.overflow);
    this.poolList = h("div", { class: "pools" });
    this.why = h("p", { class: "why", hidden: true });
    this.kill = h("button", { type: "button", class: "kill", "aria-label": `Kill ${instance.name}`, title: "End this process at once, and see what happens", text: "Kill" });
    this.kill.addEventListener("click", () => call(`ui/instances/${encodeURIComponent(instance.name)}/kill`, (response) => response, { method: "POST" }).catch((error) => announce(error.message)));
    this.element = h(
      "article",
      { class: "panel" },
      h("header", {}, this.badges, this.name, this.state, this.kill),
      h(
        "div",
        { class: "busy" },
        h("div", { class: "busy-text" }, h("span", { class: "label", text: "busy" }), this.busy),
        svg("svg", { class: "curve", viewBox: `0 0 ${HISTORY - 1} 24`, preserveAspectRatio: "none", "aria-hidden": "true" }, this.area, this.line),
        this.meter,
      ),
      this.tray,
      h("div", { class: "panel-rest" }, this.figures, this.poolList),
      this.why,
    );
  }

  update(instance) {
    const stages = stagesOf(instance.role);
    this.updateHead(instance, stages);
    const alive = instance.state === "serving" || instance.state === "draining" || instance.state === "ready";
    const busy = Math.round(instance.busy * 100);
    say(this.busy, alive ? percent(instance.busy) : "–");
    tune(this.meter, "--share", Math.min(1, instance.busy));
    if (this.meter.getAttribute("aria-valuenow") !== String(busy)) this.meter.setAttribute("aria-valuenow", busy);
    this.sample(instance.busy);
    this.figure("running", count(instance.running));
    this.figure(instance.role === "E" ? "queued" : "assigned", count(instance.waiting), instance.waiting > 0);
    this.figure("step", instance.step_seconds ? duration(instance.step_seconds) : "–");
    this.figure("cache hits", percent(instance.cache_hit_rate));
    this.figure("sent", instance.sent_rate ? rate(instance.sent_rate) : null);
    this.figure("received", instance.received_rate ? rate(instance.received_rate) : null);
    this.figure("restarts", instance.restarts ? count(instance.restarts) : null, true);
    this.figure("node", instance.node || null);
    reconcile(this.pools, this.poolList, instance.pools, (pool) => pool.name, (pool) => new Pool(pool));
    const reasons = [instance.pending && `Waits for a place: ${instance.pending}`, instance.next_role && `Becomes ${instance.next_role} next`];
    say(this.why, reasons.filter(Boolean).join(". "));
    show(this.why, Boolean(instance.pending || instance.next_role));
  }

  updateHead(instance, stages) {
    if (this.role !== instance.role) {
      this.role = instance.role;
      this.element.dataset.first = stages[0] ?? "";
      this.element.dataset.last = stages.at(-1) ?? "";
      this.badges.replaceChildren(...stages.map((stage) => h("i", { data: { stage }, text: LETTERS[stage] })));
      this.element.setAttribute("aria-label", `Instance ${instance.name}: ${stages.join(", ") || instance.role}`);
    }
    if (this.element.dataset.state !== instance.state) this.element.dataset.state = instance.state;
    say(this.state, STATES[instance.state] ?? instance.state);
  }

  /** Changes whenever its height may have. */
  shape() {
    return `${this.role} ${this.pools.size} ${this.why.textContent.length} ${[...this.values.values()].filter((one) => !one.row.hidden).length}`;
  }

  /** A value of the list; null leaves it out. */
  figure(name, value, isNotable = false) {
    let entry = this.values.get(name);
    if (!entry) {
      const text = h("dd");
      entry = { text, row: h("div", {}, h("dt", { text: name }), text) };
      this.values.set(name, entry);
      this.figures.append(entry.row);
    }
    show(entry.row, value !== null);
    say(entry.text, value ?? "");
    entry.row.classList.toggle("notable", isNotable);
  }

  /** Adds a point to the curve, once a second. */
  sample(busy) {
    const now = performance.now();
    if (now - this.sampled < 1000) return;
    this.sampled = now;
    this.history.push(Math.min(1, busy));
    if (this.history.length > HISTORY) this.history.shift();
    if (this.history.length < 3) return;
    const first = HISTORY - this.history.length;
    const points = this.history.map((share, index) => `${first + index},${(23 - share * 22).toFixed(1)}`);
    this.line.setAttribute("d", `M${points.join("L")}`);
    this.area.setAttribute("d", `M${first},24L${points.join("L")}L${HISTORY - 1},24Z`);
  }
}

class Pool {
  constructor(pool) {
    this.unit = pool.name.split("_").at(-1); // as in kv_pages
    this.value = h("span", { class: "pool-value" });
    this.bar = h("div", { class: "bar", role: "meter", "aria-label": `Fill of ${pool.name}`, "aria-valuemin": 0, "aria-valuemax": 100 }, h("i"), h("b"));
    this.element = h("div", { class: "pool" }, h("span", { class: "label", text: pool.name.replaceAll("_", " ") }), this.value, this.bar);
  }

  update(pool) {
    const used = pool.size ? pool.used / pool.size : 0;
    const cached = pool.size ? pool.cached / pool.size : 0;
    say(this.value, cached >= 0.005 ? `${percent(used)} + ${percent(cached)} cached` : percent(used));
    tune(this.bar, "--share", Math.min(1, used).toFixed(3));
    tune(this.bar, "--second", Math.min(1, used + cached).toFixed(3));
    const now = String(Math.round(used * 100));
    if (this.bar.getAttribute("aria-valuenow") !== now) this.bar.setAttribute("aria-valuenow", now);
    const amount = this.unit === "bytes" ? bytes : count;
    const unit = this.unit === "bytes" ? "" : ` ${this.unit}`;
    this.bar.title = `${amount(pool.used)} used and ${amount(pool.cached)} cached of ${amount(pool.size)}${unit}`;
  }
}

/** Where a panel stands among the lanes: [first, last] index of its stages. */
export function lanesOf(role) {
  const stages = stagesOf(role);
  if (!stages.length) return [0, 0];
  return [STAGES.indexOf(stages[0]), STAGES.indexOf(stages.at(-1))];
}
