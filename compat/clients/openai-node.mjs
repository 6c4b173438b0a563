// needs: npm openai@^7
// OpenAI's SDK for Node, over chat completions and responses.
import OpenAI from "openai";
import { context, expect, failure, image, long, model, run } from "../shared/checks.mjs";

const client = new OpenAI({ maxRetries: 0 });
const chat = (messages, more = {}) => client.chat.completions.create({ model, messages, ...more });
const user = (content) => ({ role: "user", content });
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const tools = [{ type: "function", function: { name: "get_weather", parameters } }];

await run({
  text: async () => {
    expect((await chat([user("Hi")])).choices[0].message.content, "Hello from Triptych.");
    expect((await client.responses.create({ model, input: "Hi" })).output_text, "Hello from Triptych.");
  },
  image: async () => {
    const parts = [{ type: "text", text: "What is it?" }, { type: "image_url", image_url: { url: image } }];
    expect((await chat([user(parts)])).choices[0].message.content, "I see a picture.");
    const content = [{ type: "input_text", text: "What is it?" }, { type: "input_image", image_url: image }];
    const answer = await client.responses.create({ model, input: [{ role: "user", content }] });
    expect(answer.output_text, "I see a picture.");
  },
  stream: async () => {
    const runner = client.chat.completions.stream({ model, messages: [user("Hi")] });
    let text = "";
    runner.on("content", (delta) => (text += delta));
    expect(await runner.finalContent(), "Hello from Triptych.");
    expect(text, "Hello from Triptych.");
    const events = client.responses.stream({ model, input: "Hi" });
    expect((await events.finalResponse()).output_text, "Hello from Triptych.");
  },
  turns: async () => {
    const first = await chat([user("Hi")]);
    const second = await chat([user("Hi"), first.choices[0].message, user("And now?")]);
    expect(second.choices[0].message.content, "Hello again.");
  },
  tool: async () => {
    let city;
    const get_weather = { name: "get_weather", description: "", parameters, parse: JSON.parse };
    get_weather.function = (given) => ((city = given.city), "sunny");
    const messages = [user("What is the weather in Paris?")];
    const runner = client.chat.completions.runTools({
      model, messages, stream: true, tools: [{ type: "function", function: get_weather }],
    });
    expect(await runner.finalContent(), "The tool answered.");
    expect(city, "Paris");
  },
  context: async () => {
    const error = await failure(chat([user(long)], { tools }));
    expect(error.code, "context_length_exceeded");
    expect(error.message, `maximum context length is ${context} tokens`);
    expect((await failure(client.responses.create({ model, input: long }))).code, "context_length_exceeded");
  },
});
