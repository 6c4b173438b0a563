// needs: npm @openai/agents@^0 zod@^4
// OpenAI's Agents SDK for Node, over responses (its default) and chat completions.
import { Agent, OpenAIProvider, Runner, setTracingDisabled, tool } from "@openai/agents";
import { z } from "zod";
import { context, expect, failure, image, long, model, run } from "../shared/checks.mjs";

setTracingDisabled(true);
const runners = [true, false].map(
  (useResponses) => new Runner({ modelProvider: new OpenAIProvider({ useResponses }), model }),
);
let city;
const get_weather = tool({
  name: "get_weather",
  description: "Weather of a city",
  parameters: z.object({ city: z.string() }),
  execute: async (given) => ((city = given.city), "sunny"),
});
const agent = new Agent({ name: "plain", instructions: "Answer." });
const armed = new Agent({ name: "armed", instructions: "Answer.", tools: [get_weather] });
const each = (check) => async () => {
  for (const runner of runners) await check(runner);
};

await run({
  text: each(async (runner) => expect((await runner.run(agent, "Hi")).finalOutput, "Hello from Triptych.")),
  image: each(async (runner) => {
    const content = [{ type: "input_text", text: "What is it?" }, { type: "input_image", image }];
    expect((await runner.run(agent, [{ role: "user", content }])).finalOutput, "I see a picture.");
  }),
  stream: each(async (runner) => {
    const result = await runner.run(agent, "Hi", { stream: true });
    let text = "";
    for await (const delta of result.toTextStream()) text += delta;
    await result.completed;
    expect(text, "Hello from Triptych.");
  }),
  turns: each(async (runner) => {
    const first = await runner.run(agent, "Hi");
    const second = await runner.run(agent, [...first.history, { role: "user", content: "And now?" }]);
    expect(second.finalOutput, "Hello again.");
  }),
  tool: each(async (runner) => {
    city = undefined;
    const result = await runner.run(armed, "What is the weather in Paris?");
    expect(result.finalOutput, "The tool answered.");
    expect(city, "Paris");
  }),
  context: each(async (runner) => {
    const error = await failure(runner.run(agent, long));
    expect(error.code, "context_length_exceeded");
    expect(error.message, `maximum context length is ${context} tokens`);
  }),
});
