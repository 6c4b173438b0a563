// needs: npm ai@^7 @ai-sdk/openai@^4 @ai-sdk/openai-compatible@^3 zod@^4
// Vercel's AI SDK with its three providers: openai-compatible, openai.chat, and openai, which uses responses.
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { context, expect, failure, image, long, model, run } from "../shared/checks.mjs";

const settings = { baseURL: process.env.OPENAI_BASE_URL, apiKey: process.env.OPENAI_API_KEY };
const openai = createOpenAI(settings);
const models = [
  createOpenAICompatible({ name: "triptych", ...settings })(model),
  openai.chat(model),
  openai(model),
];
// Without it, the provider for responses refers to items that the service would have to store.
const providerOptions = { openai: { store: false } };
const ask = (model, request) => generateText({ model, providerOptions, maxRetries: 0, ...request });
const each = (check) => async () => {
  for (const model of models) await check(model);
};

await run({
  text: each(async (model) => expect((await ask(model, { prompt: "Hi" })).text, "Hello from Triptych.")),
  image: each(async (model) => {
    const content = [{ type: "text", text: "What is it?" }, { type: "image", image }];
    expect((await ask(model, { messages: [{ role: "user", content }] })).text, "I see a picture.");
  }),
  stream: each(async (model) => {
    let text = "";
    for await (const delta of streamText({ model, providerOptions, prompt: "Hi" }).textStream) text += delta;
    expect(text, "Hello from Triptych.");
  }),
  turns: each(async (model) => {
    const messages = [{ role: "user", content: "Hi" }];
    messages.push(...(await ask(model, { messages })).response.messages, { role: "user", content: "And now?" });
    expect((await ask(model, { messages })).text, "Hello again.");
  }),
  tool: each(async (model) => {
    let city;
    const execute = async (given) => ((city = given.city), "sunny");
    const get_weather = tool({ description: "", inputSchema: z.object({ city: z.string() }), execute });
    const request = { prompt: "What is the weather in Paris?", tools: { get_weather }, stopWhen: stepCountIs(3) };
    expect((await ask(model, request)).text, "The tool answered.");
    expect(city, "Paris");
  }),
  context: each(async (model) => {
    const error = await failure(ask(model, { prompt: long }));
    expect(error.message, `maximum context length is ${context} tokens`);
    expect(error.responseBody, "context_length_exceeded");
  }),
});
