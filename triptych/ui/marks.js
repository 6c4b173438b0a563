// Requests in flight as marks that move from queue to instance. A mark keeps its slot for as long as it stays in a place.

import { h, say } from "./dom.js";
import { stagesOf } from "./stages.js";

const SIZE = 12; // pixels from mark to mark

const PHASES = { queued: "queued", encoding: "encode", prefilling: "prefill", decoding: "decode" };

/** Name of the place where a request is: a queue's, or the panel's of an instance that runs its stage, or else of any that has it. */
export function placeOf(request, roles) {
  if (request.queue) return `queue ${request.queue}`;
  const stage = PHASES[request.phase];
  const known = request.instances.filter((name) => roles.has(name));
  return `instance ${known.find((name) => stagesOf(roles.get(name)).includes(stage)) ?? known[0]}`;
}

export class Marks {
  constructor(board) {
    this.board = board;
    this.layer = h("div", { class: "marks", "aria-hidden": "true" });
    board.append(this.layer);
    this.places = new Map();
    this.marks = new Map();
  }

  /** Measures the places again: `trays` maps each one's name to its element. */
  measure(trays) {
    const origin = this.board.getBoundingClientRect();
    for (const name of this.places.keys()) if (!trays.has(name)) this.places.delete(name);
    for (const [name, { tray, overflow }] of trays) {
      const box = tray.getBoundingClientRect();
      const columns = Math.max(1, Math.floor(box.width / SIZE));
      const rows = Math.max(1, Math.floor(box.height / SIZE));
      const place = this.places.get(name) ?? { slots: [] };
      Object.assign(place, { x: box.left - origin.left, y: box.top - origin.top, columns, size: columns * rows, overflow });
      place.visible = box.width > 0;
      this.places.set(name, place);
    }
    this.width = origin.width;
    for (const mark of this.marks.values()) this.put(mark);
  }

  update(requests, roles) {
    const seen = new Set();
    for (const request of requests) {
      seen.add(request.key);
      let mark = this.marks.get(request.key);
      if (!mark) {
        mark = { key: request.key, element: h("i", { class: "mark" }), place: null, slot: -1, stage: "" };
        mark.element.classList.toggle("media", request.num_items > 0);
        mark.element.style.transform = `translate(-20px, ${this.entry()}px)`;
        this.layer.append(mark.element);
        mark.element.getBoundingClientRect(); // so that it moves in from the left
        this.marks.set(request.key, mark);
      }
      const stage = request.queue ? "queued" : (PHASES[request.phase] ?? "queued");
      if (mark.stage !== stage) mark.element.dataset.stage = mark.stage = stage;
      this.move(mark, placeOf(request, roles));
    }
    for (const [key, mark] of this.marks) if (!seen.has(key)) this.end(mark);
    for (const place of this.places.values()) {
      const more = place.slots.filter(Boolean).length - place.size;
      if (place.overflow) say(place.overflow, more > 0 ? `+${more}` : "");
    }
  }

  entry() {
    return this.places.get("queue encode")?.y ?? 40;
  }

  move(mark, name) {
    if (mark.place === name) return;
    const place = this.places.get(name);
    if (!place) return; // not measured yet
    this.leave(mark);
    mark.place = name;
    const free = place.slots.findIndex((taken) => !taken);
    mark.slot = free < 0 ? place.slots.length : free;
    place.slots[mark.slot] = mark;
    this.put(mark);
  }

  leave(mark) {
    const place = this.places.get(mark.place);
    if (place && place.slots[mark.slot] === mark) place.slots[mark.slot] = null;
  }

  put(mark) {
    const place = this.places.get(mark.place);
    if (!place) return;
    const slot = Math.min(mark.slot, place.size - 1);
    const x = place.x + (slot % place.columns) * SIZE;
    const y = place.y + Math.floor(slot / place.columns) * SIZE;
    mark.element.style.transform = `translate(${x.toFixed(1)}px, ${y.toFixed(1)}px)`;
    mark.element.classList.toggle("over", mark.slot >= place.size || !place.visible);
    mark.y = y;
  }

  end(mark) {
    this.leave(mark);
    this.marks.delete(mark.key);
    mark.element.classList.add("gone");
    mark.element.style.transform = `translate(${this.width - 8}px, ${mark.y ?? 40}px)`;
    setTimeout(() => mark.element.remove(), 600);
  }
}
