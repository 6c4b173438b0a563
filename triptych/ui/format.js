// Numbers, durations and times as people read them. Spaces before units don't break.

const SPACE = "\u202f";
const unit = (number, name) => `${number}${SPACE}${name}`;

const round = (value, digits) => value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });

export const count = (value) => value.toLocaleString("en");

export const plural = (value, one, many = `${one}s`) => `${count(value)} ${value === 1 ? one : many}`;

export const percent = (share) => (share === null || share === undefined ? "–" : unit(Math.round(share * 100), "%"));

/** A duration in seconds. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds <= 0) return unit(0, "s");
  if (seconds < 0.01) return unit(round(seconds * 1000, 1), "ms");
  if (seconds < 1) return unit(Math.round(seconds * 1000), "ms");
  if (seconds < 10) return unit(round(seconds, 1), "s");
  if (seconds < 120) return unit(Math.round(seconds), "s");
  if (seconds < 7200) return unit(Math.round(seconds / 60), "min");
  if (seconds < 172800) return unit(Math.round(seconds / 3600), "h");
  return unit(Math.round(seconds / 86400), "days");
}

/** Bytes, with a decimal prefix. */
export function bytes(value) {
  const prefixes = ["B", "kB", "MB", "GB", "TB"];
  let power = 0;
  while (value >= 1000 && power < prefixes.length - 1) {
    value /= 1000;
    power += 1;
  }
  return unit(round(value, power > 0 && value < 100 ? 1 : 0), prefixes[power]);
}

export const rate = (bytesPerSecond) => `${bytes(bytesPerSecond)}/s`;

const clock = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });
const short = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", hourCycle: "h23" });
const full = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "medium", hourCycle: "h23" });

/** Seconds since the epoch, as a time of day where the viewer is. */
export const timeOfDay = (seconds) => clock.format(new Date(seconds * 1000));

export const hourAndMinute = (seconds) => short.format(new Date(seconds * 1000));

export const dateTime = (seconds) => full.format(new Date(seconds * 1000));
