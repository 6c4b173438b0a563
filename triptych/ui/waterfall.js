// Where a request's time went: a table with a bar for each interval, and in words which instance did what.

import { h } from "./dom.js";
import { duration } from "./format.js";
import { isStage } from "./stages.js";

/** Rows from intervals in seconds since the epoch (`RequestView.timeline`). An end of 0 is "still running". */
export function fromIntervals(intervals, began, now) {
  return intervals.map(({ stage, start, end, item, instance }) => ({
    stage,
    from: Math.max(0, start - began),
    to: Math.max(0, (end || now) - began),
    item,
    instance,
    running: !end,
  }));
}

/** Rows from the field `timeline` of an answer, in milliseconds since the request arrived. */
export const fromAnswer = (timeline) =>
  timeline.map(({ stage, start_ms, end_ms, item, instance }) => ({ stage, from: start_ms / 1000, to: end_ms / 1000, item, instance }));

const itemName = (item) => (item === null || item === undefined ? "" : ` ${item + 1}`);

const GAP = 0.02; // share of the whole from which a time in which no stage was at work is a row

/** Rows for the times that no row covers: of messages between processes, and of waiting for a turn there. */
function gapsOf(ordered, length) {
  const gaps = [];
  let covered = 0;
  for (const { from, to } of [...ordered, { from: length, to: length }]) {
    if (from - covered > GAP * length) gaps.push({ stage: "in between", from: covered, to: from, instance: "–", gap: true });
    covered = Math.max(covered, to);
  }
  return gaps;
}

/** The table; `total` is the length of its axis in seconds, if it is more than the last row's end. */
export function waterfall(rows, total = 0) {
  const byTime = (a, b) => a.from - b.from || a.to - b.to;
  const stages = [...rows].sort(byTime);
  const length = Math.max(total, ...stages.map((row) => row.to), 1e-6);
  const ordered = [...stages, ...gapsOf(stages, length)].sort(byTime);
  const axis = h("div", { class: "axis" });
  const step = stepOf(length);
  for (let time = 0; time < length * 0.93; time += step) {
    const tick = h("span", { text: time ? duration(time) : "0" });
    tick.style.setProperty("--from", (time / length).toFixed(4));
    axis.append(tick);
  }
  const table = h(
    "table",
    { class: "waterfall" },
    h("caption", { class: "visually-hidden", text: "Where the time went" }),
    h("colgroup", {}, h("col"), h("col"), h("col"), h("col")),
    h("thead", {}, h("tr", {}, ...["Stage", "Where"].map((text) => h("th", { scope: "col", text })), h("th", { scope: "col", class: "number", text: "Took" }), h("th", { scope: "col" }, h("span", { class: "visually-hidden", text: "When" }), axis))),
    h("tbody", {}, ...ordered.map((row) => waterfallRow(row, length))),
  );
  table.style.setProperty("--step", (step / length).toFixed(5));
  return table;
}

/** A round number of seconds, of which three to five fit. */
function stepOf(length) {
  const power = 10 ** Math.floor(Math.log10(length / 3));
  const factor = [5, 2.5, 2, 1].find((one) => length / (one * power) >= 3) ?? 1;
  return factor * power;
}

function waterfallRow(row, length) {
  const bar = h("i");
  bar.style.setProperty("--from", Math.min(1, row.from / length).toFixed(4));
  bar.style.setProperty("--length", Math.max(0, (row.to - row.from) / length).toFixed(4));
  const stage = isStage(row.stage) ? row.stage : "queue";
  return h(
    "tr",
    { class: row.running ? "running" : row.gap ? "gap" : null, title: row.gap ? "Messages between processes, and waiting for a turn there" : null },
    h("td", {}, h("span", { class: "chip", data: { stage }, text: row.stage + itemName(row.item) })),
    h("td", { text: row.instance || "frontend" }),
    h("td", { class: "number", text: duration(row.to - row.from) }),
    h("td", {}, h("div", { class: "track", data: { stage }, title: `from ${duration(row.from)} to ${duration(row.to)}` }, bar)),
  );
}

const DEEDS = { encode: "encoded", prefill: "prefilled", decode: "decoded", preprocess: "preprocessed", transfer: "received rows" };

/** A list that says what each instance did, and for how long. */
export function whoDidWhat(rows) {
  const deeds = new Map();
  for (const { stage, instance, from, to, item } of rows) {
    if (!instance || !(stage in DEEDS)) continue;
    const of = deeds.get(instance) ?? new Map();
    const deed = of.get(stage) ?? { seconds: 0, items: new Set() };
    deed.seconds += to - from;
    if (item !== null && item !== undefined) deed.items.add(item + 1);
    of.set(stage, deed);
    deeds.set(instance, of);
  }
  const lines = [...deeds].map(([instance, of]) => {
    const parts = [...of].map(([stage, { seconds, items }]) => {
      const what = items.size ? ` item ${[...items].sort((a, b) => a - b).join(", ")}` : "";
      return `${DEEDS[stage]}${stage === "transfer" && items.size ? " of" : ""}${what} in ${duration(seconds)}`;
    });
    return h("li", {}, h("strong", { text: instance }), ` ${parts.join(", ")}`);
  });
  return lines.length ? h("ul", { class: "who", "aria-label": "Which instance did what" }, ...lines) : null;
}
