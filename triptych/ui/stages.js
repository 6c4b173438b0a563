// The three stages, and what the page calls the stages of a timeline.

export const STAGES = ["encode", "prefill", "decode"];
export const LETTERS = { encode: "E", prefill: "P", decode: "D" };
export const TITLES = { encode: "Encode", prefill: "Prefill", decode: "Decode" };

/** What a verdict is about → its headline. */
export const VERDICTS = {
  frontend: "Frontend binds",
  encode: "Encode binds",
  prefill: "Prefill binds",
  decode: "Decode binds",
  client: "One client binds",
  service: "Not ready",
  "": "Nothing binds",
};

/** Stages of an instance, from its role: the first is the lane that it stands in. */
export const stagesOf = (role) => STAGES.filter((stage) => role.includes(LETTERS[stage]));

/** Stages of a timeline, in the order in which a request goes through them. */
export const TIMELINE = ["fetch", "plan", "queue", "preprocess", "encode", "transfer", "prefill", "decode"];

/** Whether it has a colour. */
export const isStage = (name) => TIMELINE.includes(name);
