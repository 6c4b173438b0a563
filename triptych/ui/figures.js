// The metrics of the last minutes, hour or day, as charts (uPlot) and as tables.

import { byId, h, say, show } from "./dom.js";
import { count, duration, hourAndMinute, percent, plural, timeOfDay } from "./format.js";
import { address, call } from "./net.js";

const EVERY = 5000; // milliseconds between two looks
const SHORTEST = 300; // seconds that charts show at least
const BEGUN = 5; // seconds of a span from which its rates are shown

const perSecond = (value) => value.toLocaleString("en", { maximumFractionDigits: value < 10 ? 1 : 0 });
const at = (list, index) => (list.length > index ? list[index] : null);

/** A number per second of a bucket, whose span may not be over; null while it has hardly begun. */
const perSecondOf = (number, bucket) => (bucket.seconds < BEGUN ? null : number / bucket.seconds);

const perMinuteOf = (number, bucket) => perSecondOf(60 * number, bucket);

/** `series`: a name, a colour, and the value of a bucket. */
const CHARTS = [
  {
    title: "Time to first token",
    format: duration,
    series: [["median", "--prefill", (b) => at(b.time_to_first_token, 0)], ["90th percentile", "--encode", (b) => at(b.time_to_first_token, 1)]],
  },
  {
    title: "Time per token",
    format: duration,
    series: [["median", "--decode", (b) => at(b.time_per_token, 0)], ["90th percentile", "--encode", (b) => at(b.time_per_token, 1)]],
  },
  { title: "Output tokens per second", format: perSecond, series: [["tokens", "--decode", (b) => perSecondOf(b.num_tokens, b)]], fromZero: true },
  {
    title: "Goodput: requests within the objective",
    format: percent,
    series: [["share", "--good", (b) => (b.num_ended ? b.num_good / b.num_ended : null)]],
    share: true,
  },
  {
    title: "Cache hits",
    format: percent,
    series: [["prefix cache", "--prefill", (b) => b.prefix_hit_rate], ["encoder cache", "--encode", (b) => b.encode_hit_rate]],
    share: true,
  },
  {
    title: "Requests per minute",
    format: perSecond,
    series: [["ended", "--transfer", (b) => perMinuteOf(b.num_ended, b)], ["failed", "--bad", (b) => perMinuteOf(b.num_failed, b)]],
    fromZero: true,
  },
];

let timer = 0;
let looks = 0;
let isHere = false;
let charts = null;
let latest = null;

export function enter() {
  isHere = true;
  refresh();
}

export function leave() {
  isHere = false;
  clearTimeout(timer);
}

let loading = null;

function loadUplot() {
  loading ??= new Promise((resolve, reject) => {
    document.head.append(
      h("link", { rel: "stylesheet", href: address("ui/uPlot.min.css") }),
      h("script", { src: address("ui/uPlot.iife.min.js"), on: { load: resolve, error: reject } }),
    );
  }).catch(() => {
    loading = null; // the next look tries again
    throw new Error("the charts can't be loaded");
  });
  return loading;
}

async function refresh() {
  clearTimeout(timer);
  looks += 1;
  const mine = looks;
  const query = new URLSearchParams({ seconds: range(), ttft_ms: byId("objective-first").value || 1000, tpt_ms: byId("objective-token").value || 100 });
  try {
    await loadUplot();
    charts ??= CHARTS.map((chart) => new Chart(chart));
    const found = await call(`ui/figures?${query}`, async (response) => {
      const now = (Date.parse(response.headers.get("Date")) || Date.now()) / 1000;
      return { ...(await response.json()), now };
    });
    if (mine !== looks) return; // the objective has changed since
    latest = found;
    for (const bucket of latest.buckets) bucket.seconds = Math.min(latest.step, latest.now - bucket.time);
    draw();
  } catch (error) {
    if (mine !== looks) return;
    say(byId("figures-empty"), error.message);
    show(byId("figures-empty"), true);
  }
  if (isHere && mine === looks) timer = setTimeout(refresh, EVERY);
}

const range = () => Number(byId("figures-range").value);
const rangeName = () => `last ${byId("figures-range").selectedOptions[0].text}`;

function draw() {
  const { buckets, step } = latest;
  say(byId("figures-empty"), `No request has ended in the ${rangeName()}. Ask something in the playground.`);
  show(byId("figures-empty"), buckets.length === 0);
  show(byId("charts"), buckets.length > 0);
  drawTiles(buckets);
  const filled = withGaps(buckets, step);
  for (const chart of charts) chart.update(filled, buckets);
}

/** The latest value of a series; null if there is none of this span or the one before. */
function latestOf(value) {
  const recent = latest.buckets.filter((bucket) => bucket.time > latest.now - 2 * latest.step);
  return recent.map(value).findLast((one) => one !== null) ?? null;
}

function drawTiles(buckets) {
  const sum = (name) => buckets.reduce((total, bucket) => total + bucket[name], 0);
  const ended = sum("num_ended");
  const tokens = latestOf((bucket) => perSecondOf(bucket.num_tokens, bucket));
  const tile = (name, value, note) => h("div", {}, h("dt", { text: name }), h("dd", {}, value, h("small", { text: note })));
  byId("tiles").replaceChildren(
    tile("Requests ended", count(ended), rangeName()),
    tile("Within the objective", ended ? percent(sum("num_good") / ended) : "–", `${plural(sum("num_good"), "request")}`),
    tile("Failed", count(sum("num_failed")), ended ? percent(sum("num_failed") / ended) : ""),
    tile("First token", duration(latestOf((bucket) => at(bucket.time_to_first_token, 0))), "median, latest"),
    tile("Per token", duration(latestOf((bucket) => at(bucket.time_per_token, 0))), "median, latest"),
    tile("Output tokens per second", tokens === null ? "–" : perSecond(tokens), "latest"),
  );
}

/** Inserts a bucket of nothing where one is left out, so that lines don't cross the gap. */
function withGaps(buckets, step) {
  const filled = [];
  for (const bucket of buckets) {
    const before = filled.at(-1);
    if (before && bucket.time - before.time > step * 1.5) filled.push(nothingAt(before.time + step, step), nothingAt(bucket.time - step, step));
    filled.push(bucket);
  }
  return filled.filter((bucket, index) => index === 0 || bucket.time > filled[index - 1].time);
}

const nothingAt = (time, seconds) => ({
  time,
  seconds,
  num_ended: 0,
  num_failed: 0,
  num_good: 0,
  num_tokens: 0,
  time_to_first_token: [],
  time_per_token: [],
  prefix_hit_rate: null,
  encode_hit_rate: null,
});

/** Canvases know no custom properties: the browser resolves them for an element. */
function colour(name) {
  const probe = h("span");
  probe.style.color = `var(${name})`;
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

class Chart {
  constructor(chart) {
    this.chart = chart;
    this.holder = h("div", { class: "plot", "aria-hidden": "true" });
    this.latest = h("span", { class: "keys" });
    this.table = h("tbody");
    const names = ["Time", ...chart.series.map(([name]) => name)];
    const head = h("thead", {}, h("tr", {}, ...names.map((text) => h("th", { scope: "col", text }))));
    const table = h("table", {}, h("caption", { class: "visually-hidden", text: chart.title }), head, this.table);
    this.details = h("details", {}, h("summary", { text: "As a table" }), h("div", { tabindex: 0, role: "group", "aria-label": `${chart.title}, table` }, table));
    byId("charts").append(h("figure", { class: "card chart" }, h("figcaption", {}, h("h2", { text: chart.title }), this.latest), this.holder, this.details));
    this.details.addEventListener("toggle", () => this.fillTable());
    document.addEventListener("themechange", () => this.restart());
    new ResizeObserver(() => this.plot?.setSize(this.size())).observe(this.holder);
  }

  size() {
    return { width: Math.max(120, this.holder.clientWidth), height: this.holder.clientHeight };
  }

  restart() {
    this.plot?.destroy();
    this.plot = null;
    if (this.data) this.drawPlot();
  }

  update(filled, buckets) {
    this.data = [filled.map((bucket) => bucket.time), ...this.chart.series.map(([, , value]) => filled.map(value))];
    this.buckets = buckets;
    this.drawPlot();
    this.showKeys();
    this.fillTable();
  }

  /** The names of the lines, with the values under the pointer or, without one, the latest. */
  showKeys() {
    const index = this.plot?.cursor.idx ?? null;
    const keys = this.chart.series.map(([name, variable, value], line) => {
      const key = h("i");
      key.style.setProperty("--colour", `var(${variable})`);
      return h("span", {}, key, `${name} ${this.format(index === null ? latestOf(value) : this.data[line + 1][index])}`);
    });
    if (index !== null) keys.unshift(h("time", { text: timeOfDay(this.data[0][index]) }));
    this.latest.replaceChildren(...keys);
  }

  format(value) {
    return value === null || value === undefined ? "–" : this.chart.format(value);
  }

  fillTable() {
    if (!this.details.open || !this.buckets) return;
    this.table.replaceChildren(
      ...[...this.buckets].reverse().map((bucket) =>
        h("tr", {}, h("th", { scope: "row", text: timeOfDay(bucket.time) }), ...this.chart.series.map(([, , value]) => h("td", { text: this.format(value(bucket)) }))),
      ),
    );
  }

  drawPlot() {
    if (this.holder.clientWidth === 0) return;
    if (this.plot) this.plot.setData(this.data);
    else this.plot = new window.uPlot(this.options(), this.data, this.holder);
  }

  options() {
    const axis = { stroke: colour("--muted"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false }, font: "12px system-ui, sans-serif" };
    const { chart } = this;
    const top = (max) => (chart.share ? 1 : max > 0 ? max * 1.15 : 1);
    return {
      ...this.size(),
      padding: [10, 24, 0, 0],
      legend: { show: false },
      cursor: { y: false, points: { size: 7 } },
      hooks: { setCursor: [() => this.showKeys()] },
      scales: { x: { range: () => this.span() }, y: { range: (_, __, max) => [0, top(max ?? 0)] } },
      axes: [{ ...axis, space: 56, size: 28, values: (_, ticks) => ticks.map(hourAndMinute) }, { ...axis, size: 62, space: 36, values: (_, ticks) => ticks.map((tick) => chart.format(tick)) }],
      series: [{}, ...chart.series.map(([label, variable], index) => this.series(label, colour(variable), index))],
    };
  }

  /** The range, or less while there are no figures of most of it. */
  span() {
    const { now } = latest;
    const first = this.data[0][0] ?? now;
    return [Math.max(now - range(), Math.min(first, now - SHORTEST)), now];
  }

  series(label, stroke, index) {
    const fill = index === 0 && this.chart.series.length === 1 ? stroke.replace("rgb(", "rgba(").replace(")", ", 0.12)") : undefined;
    return { label, stroke, fill, width: 1.75, points: { show: this.data[0].length < 40 || undefined, size: 4, fill: stroke }, spanGaps: false };
  }
}

byId("objective").addEventListener("submit", (event) => event.preventDefault());
byId("objective").addEventListener("change", () => isHere && refresh());
