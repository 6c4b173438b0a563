// Talks to the service: the API key, requests, and streams of events. EventSource can't send a key, so fetch reads them.

const ROOT = new URL("..", import.meta.url);
const KEY = "triptych-api-key";
const ANSWER = 30000; // milliseconds within which the service must answer
const STREAM = 15000; // and after which a stream of snapshots counts as broken
const SLOWEST = 100; // bytes in a millisecond at which a request is sent at least

/** The service answered with an error, or the viewer gave no key. */
export class Refused extends Error {
  constructor(status, { message, code, param }) {
    super(message);
    this.status = status;
    this.code = code;
    this.param = param;
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

/** Gives up a request when nothing has been heard of it for some milliseconds, or by `abort`. */
export class Patience {
  constructor(milliseconds) {
    this.milliseconds = milliseconds;
    this.controller = new AbortController();
    this.timer = 0;
  }

  /** Begins to wait again. `extra` milliseconds are for this time only. */
  heard(extra = 0) {
    const seconds = Math.round((this.milliseconds + extra) / 1000);
    this.stop();
    this.timer = setTimeout(() => this.abort(new Error(`the service has sent nothing for ${seconds} s`)), this.milliseconds + extra);
  }

  stop() {
    clearTimeout(this.timer);
  }

  abort(reason) {
    this.stop();
    this.controller.abort(reason);
  }
}

/** As fetch, with the key; asks for one on 401. Returns what `read` makes of the response. Throws Refused for any other
 *  status than 2xx, and an error that says so if the service can't be reached or is silent. */
export async function call(path, read, { headers = {}, patience = new Patience(ANSWER), ...options } = {}) {
  for (;;) {
    const key = sessionStorage.getItem(KEY);
    const number = access.number;
    const authorization = key === null ? {} : { Authorization: `Bearer ${key}` };
    let error;
    patience.heard((options.body?.length ?? 0) / SLOWEST);
    try {
      const response = await reached(fetch(address(path), { ...options, headers: { ...authorization, ...headers }, signal: patience.controller.signal }));
      if (response.ok) return await read(response);
      error = new Refused(response.status, await errorOf(response));
    } finally {
      patience.stop(); // the viewer may take any time for the dialog
    }
    if (error.status !== 401) throw error;
    // another call's dialog may have been answered in the meantime
    if (number === access.number && !(await requestKey(key !== null))) throw error;
  }
}

/** Waits for something from the network. Browsers throw TypeErrors, in words of their own, when a connection fails. */
async function reached(something) {
  try {
    return await something;
  } catch (error) {
    throw error instanceof TypeError ? new Error("the service can't be reached") : error;
  }
}

export const getJson = (path) => call(path, (response) => reached(response.json()));

/** Posts JSON; returns what `read` makes of the response. */
export const postJson = (path, body, read, options = {}) =>
  call(path, read, {
    ...options,
    method: "POST",
    headers: { "Content-Type": "application/json", ...options.headers },
    body: JSON.stringify(body),
  });

/** The error of the API, or the text of another answer as one. */
async function errorOf(response) {
  const text = await response.text().catch(() => "");
  try {
    const { message, code, param } = JSON.parse(text).error;
    return { message, code, param };
  } catch {
    return { message: text.slice(0, 500) || `HTTP status ${response.status}`, code: "", param: "" };
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
      const { value, done } = await reached(reader.read());
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
  let patience = null;
  let wake = () => {};
  let failures = 0;

  async function read(response) {
    for await (const data of events(response)) {
      patience.heard();
      failures = 0;
      onState("live", "");
      onSnapshot(JSON.parse(data));
    }
    throw new Error("the service ended it");
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
        patience = new Patience(STREAM);
        await call("ui/events", read, { patience });
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
        onState("broken", `${error.message}; trying again in ${seconds} s`);
        await pause(seconds * 1000);
      }
    }
  }

  document.addEventListener("visibilitychange", () => {
    if (document.hidden) patience?.abort(new Error("paused"));
    else wake();
  });
  run();
  return { retry: () => wake() };
}
