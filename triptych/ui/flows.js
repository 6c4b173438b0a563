// Transfers between lanes: bands from the panels that send to those that receive, as thick as what they carry.

import { h, say, show, svg } from "./dom.js";
import { rate } from "./format.js";

/** Of each flow: who sends it, who receives it, and what it carries. */
const KINDS = {
  embeddings: { sends: (role) => role === "E", receives: (role) => role !== "E" && role.includes("P"), name: "embeddings" },
  kv: { sends: (role) => role === "P" || role === "EP", receives: (role) => role === "D", name: "KV pages" },
};
const THICKEST = 7;

/** Pixels for bytes per second: each factor of ten adds the same, so that kB/s and GB/s are both visible. */
const thickness = (bytes) => (bytes <= 0 ? 1 : Math.max(1.5, Math.min(THICKEST, 1.1 * (Math.log10(bytes) - 2))));

const PORT = 20; // pixels from a panel's top to where bands end
const BEND = 10; // radius of their bends

const want = (wanted, key, path, bytes) => path && wanted.set(key, { path, bytes });

/** From a sender's right edge to the label in the middle of the gutter, or to the trunk below it. */
function pathFrom(box, middle) {
  if (!box) return null;
  const [x, y, trunk, level] = [box.x + box.width, box.y + PORT, middle.x + middle.width / 2, middle.y + middle.height / 2];
  if (Math.abs(y - level) < BEND * 2) return `M${x},${level}H${middle.x}`;
  return `M${x},${y}H${trunk - BEND}Q${trunk},${y} ${trunk},${y - BEND}V${middle.y + middle.height}`;
}

/** From there to a receiver's left edge. */
function pathTo(box, middle) {
  if (!box) return null;
  const [x, y, trunk, level] = [box.x, box.y + PORT, middle.x + middle.width / 2, middle.y + middle.height / 2];
  if (Math.abs(y - level) < BEND * 2) return `M${middle.x + middle.width},${level}H${x}`;
  return `M${trunk},${middle.y + middle.height}V${y - BEND}Q${trunk},${y} ${trunk + BEND},${y}H${x}`;
}

export class Flow {
  constructor(kind) {
    this.kind = KINDS[kind];
    this.value = h("strong");
    this.element = h("p", { class: "flow", data: { kind } }, this.value, h("span", { text: this.kind.name }));
    this.group = svg("g", { data: { kind } });
    this.bands = new Map();
  }

  /** `boxes` maps names of instances to their rectangles on the board; null where there is no room for bands.
   *  Returns whether the label has appeared or gone: the boxes are out of date then. */
  update(instances, boxes) {
    const senders = instances.filter((one) => this.kind.sends(one.role));
    const receivers = instances.filter((one) => this.kind.receives(one.role));
    const exists = senders.length > 0 && receivers.length > 0;
    const total = senders.reduce((sum, one) => sum + one.sent_rate, 0);
    const changed = this.element.hidden === exists;
    show(this.element, exists);
    say(this.value, total > 0 ? rate(total) : "idle");
    this.element.classList.toggle("idle", total <= 0);
    const wanted = new Map();
    const middle = boxes?.get(this.element);
    if (exists && middle) {
      for (const one of senders) want(wanted, `> ${one.name}`, pathFrom(boxes.get(one.name), middle), one.sent_rate);
      for (const one of receivers) want(wanted, `${one.name} <`, pathTo(boxes.get(one.name), middle), total && one.received_rate);
    }
    this.draw(wanted);
    return changed;
  }

  draw(wanted) {
    for (const [key, band] of this.bands) {
      if (wanted.has(key)) continue;
      band.element.remove();
      this.bands.delete(key);
    }
    for (const [key, { path, bytes }] of wanted) {
      let band = this.bands.get(key);
      if (!band) {
        const bed = svg("path", { class: "bed" });
        const run = svg("path", { class: "run" });
        band = { bed, run, element: svg("g", {}, bed, run) };
        this.bands.set(key, band);
        this.group.append(band.element);
      }
      if (band.path !== path) {
        band.path = path;
        band.bed.setAttribute("d", path);
        band.run.setAttribute("d", path);
      }
      const width = thickness(bytes).toFixed(1);
      if (band.width !== width) {
        band.width = width;
        band.bed.style.strokeWidth = width;
        band.run.style.strokeWidth = Math.max(1, width / 3);
      }
      band.element.classList.toggle("idle", bytes <= 0);
    }
  }
}
