// Talks to the service: the API key, requests, and streams of events. EventSource can't send a key, so fetch reads them.

import { next } from "./snapshots.js";

const ROOT = new URL("..", import.meta.url);
const KEY = "triptych-api-key";
const SILENCE = 15000; // milliseconds after which a stream counts as broken

/** The service answered with an error, or the viewer gave no key. */
export class Refused extends Error {
  constructor(status, { message, code }) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

const access = { ask: null, pending: null, declined: false, number: 0 };

/** `ask(wasWrong)` shows the key dialog and resolves to a key, or to null if the viewer gave none. */
export function onKeyNeeded(ask) {
  access.ask = ask;
}

/** Lets the key dialog appear again after the viewer has closed it. */
export function askAgain() {
  access.declined = false;
}

/** Asks for a key unless the viewer has declined. Resolves to whether there is one now. */
export function requestKey(wasWrong) {
  if (access.declined) return Promise.resolve(false);
  access.pending ??= access.ask(wasWrong).then((key) => {
    access.pending = null;
    access.declined = key === null;
    access.number += 1;
    if (key !== null) sessionStorage.setItem(KEY, key);
    return key !== null;
  });
  return access.pending;
}

export const hasKey = () => sessionStorage.getItem(KEY) !== null;

export const address = (path) => new URL(path, ROOT);

/** As fetch, with the key; asks for one on 401. Throws Refused for any other status than 2xx. */
export async function call(path, { headers = {}, ...options } = {}) {
  for (;;) {
    const key = sessionStorage.getItem(KEY);
    const number = access.number;
    const authorization = key === null ? {} : { Authorization: `Bearer ${key}` };
    const response = await fetch(address(path), { ...options, headers: { ...authorization, ...headers } });
    if (response.ok) return response;
    const error = await errorOf(response);
    if (response.status !== 401) throw new Refused(response.status, error);
    // another call's dialog may have been answered in the meantime
    if (number === access.number && !(await requestKey(key !== null))) throw new Refused(401, error);
  }
}

export const getJson = async (path, options) => (await call(path, options)).json();

export const postJson = (path, body, options = {}) =>
  call(path, {
    ...options,
    method: "POST",
    headers: { "Content-Type": "application/json", ...options.headers },
    body: JSON.stringify(body),
  });

/** The error of the API, or the text of another answer as one. */
async function errorOf(response) {
  const text = await response.text().catch(() => "");
  try {
    const { message, code } = JSON.parse(text).error;
    return { message, code };
  } catch {
    return { message: text.slice(0, 500) || `HTTP status ${response.status}`, code: "" };
  }
}

/** Random text for a name that nobody else gives. Not randomUUID, which only secure origins have. */
export const newName = () => `ui-${[...crypto.getRandomValues(new Uint8Array(12))].map((byte) => byte.toString(16).padStart(2, "0")).join("")}`;

/** The data of each event of a stream. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const data = part.split("\n").filter((line) => line.startsWith("data:"));
        if (data.length) yield data.map((line) => line.slice(5).trimStart()).join("\n");
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** Follows the service's snapshots for as long as the page is visible; connects again when the stream breaks.
 *  `onState(state, text)` gets "connecting", "live", "paused" or "broken", and why. */
export function follow(onSnapshot, onState) {
  let controller = null;
  let wake = () => {};
  let failures = 0;

  async function read() {
    controller = new AbortController();
    let silence = 0;
    let snapshot = null;
    const heard = () => {
      clearTimeout(silence);
      silence = setTimeout(() => controller.abort(new Error(`it sent nothing for ${SILENCE / 1000} s`)), SILENCE);
    };
    try {
      const response = await call("ui/events", { signal: controller.signal });
      heard();
      for await (const data of events(response)) {
        heard();
        failures = 0;
        onState("live", "");
        snapshot = next(snapshot, JSON.parse(data));
        onSnapshot(snapshot);
      }
      throw new Error("the service ended it");
    } finally {
      clearTimeout(silence);
    }
  }

  const pause = (milliseconds) =>
    new Promise((resolve) => {
      wake = resolve;
      if (milliseconds) setTimeout(resolve, milliseconds);
    });

  async function run() {
    for (;;) {
      if (document.hidden) {
        onState("paused", "");
        await pause(0);
        continue;
      }
      if (failures === 0) onState("connecting", "");
      try {
        await read();
      } catch (error) {
        if (document.hidden) continue;
        const refused = error instanceof Refused;
        if (refused && [401, 403, 404].includes(error.status)) {
          onState("refused", error.message, error.status);
          await pause(0);
          continue;
        }
        const seconds = Math.min(10, 2 ** failures);
        failures += 1;
        const reason = error instanceof TypeError ? "the service can't be reached" : error.message;
        onState("broken", `${reason}; trying again in ${seconds} s`);
        await pause(seconds * 1000);
      }
    }
  }

  document.addEventListener("visibilitychange", () => {
    if (document.hidden) controller?.abort(new Error("paused"));
    else wake();
  });
  run();
  return { retry: () => wake() };
}
