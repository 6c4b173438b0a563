// What the Node clients share: the service's addresses, the questions, and one line printed per check.
import { readFileSync } from "node:fs";

export const model = process.env.COMPAT_MODEL;
export const image = `data:image/png;base64,${readFileSync(process.env.COMPAT_IMAGE, "base64")}`;
export const context = process.env.COMPAT_CONTEXT; // tokens
export const long = readFileSync(process.env.COMPAT_LONG, "utf8");

/** Throws an error that shows `answer` unless it contains `expected`. */
export function expect(answer, expected) {
  if (!String(answer ?? "").includes(expected)) throw new Error(`answer: ${JSON.stringify(answer)}`);
}

/** Waits for `promise` to be rejected and returns its error; throws if it isn't. */
export async function failure(promise) {
  const answer = await promise.catch((error) => ({ error }));
  if (!answer?.error) throw new Error("no error");
  return answer.error;
}

/** Runs the checks one after another and prints `NAME: ok` or `NAME: failed REASON` for each. */
export async function run(checks) {
  for (const [name, check] of Object.entries(checks)) {
    try {
      await check();
      console.log(`${name}: ok`);
    } catch (error) {
      console.log(`${name}: failed ${String(error?.message ?? error).replace(/\s+/g, " ").slice(0, 300)}`);
    }
  }
}
