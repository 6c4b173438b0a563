// A request as code. Texts and names are quoted for the language that they stand in.

const shellQuoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

/** The request with `address()` in place of the address of each media item. */
function withAddresses(body, address) {
  const messages = body.messages.map((message) => ({
    ...message,
    content: Array.isArray(message.content)
      ? message.content.map((part) => (part.type === "text" ? part : { type: part.type, [part.type]: { url: address() } }))
      : message.content,
  }));
  return { ...body, messages };
}

/** The request with a mark in place of the address of each media item, and the marks: texts that neither the rest of it
 *  nor a file's name has. */
function marked(body, files) {
  const texts = JSON.stringify([withAddresses(body, () => ""), files]);
  let edge = "@@";
  while (texts.includes(edge)) edge += "@";
  const marks = files.map((_, index) => edge + index + edge);
  let item = 0;
  return { request: withAddresses(body, () => marks[item++]), marks };
}

/** `files` names the file of each media item, in order. */
export function asCurl(base, body, files, needsKey) {
  const key = needsKey ? ` \\\n  -H "Authorization: Bearer $TRIPTYCH_API_KEY"` : "";
  const curl = `curl -N ${base}v1/chat/completions${key} \\\n  -H 'Content-Type: application/json' \\\n  -d `;
  const { request, marks } = marked(body, files);
  let rest = JSON.stringify(request, null, 2);
  if (!files.length) return curl + shellQuoted(rest);
  // through standard input, because Linux limits an argument to 128 KiB; curl drops the line feeds of base64 from there
  const lines = files.flatMap((file, index) => {
    const end = rest.indexOf(marks[index]);
    const before = `${rest.slice(0, end)}data:${file.kind};base64,`;
    rest = rest.slice(end + marks[index].length);
    return [`printf %s ${shellQuoted(before)}`, `base64 < ${shellQuoted(file.name)}`];
  });
  return `{\n${[...lines, `printf %s ${shellQuoted(rest)}`].join("\n")}\n} | ${curl}@-`;
}

export function asPython(base, body, files, needsKey) {
  const { request, marks } = marked(body, files);
  const json = JSON.stringify(request.messages, null, 4);
  const messages = files.reduce((text, file, index) => text.replace(JSON.stringify(marks[index]), () => `data_url(${JSON.stringify(file.name)}, ${JSON.stringify(file.kind)})`), json);
  const key = needsKey ? 'os.environ["TRIPTYCH_API_KEY"]' : '"none"';
  const reader = files.length
    ? `def data_url(name, kind):
    with open(name, "rb") as file:
        return f"data:{kind};base64,{base64.b64encode(file.read()).decode()}"


`
    : "";
  return `# pip install openai
${files.length ? "import base64\n" : ""}${needsKey ? "import os\n" : ""}
import openai

${reader ? `\n${reader}` : ""}client = openai.OpenAI(base_url="${base}v1", api_key=${key})
stream = client.chat.completions.create(
    model=${JSON.stringify(body.model)},
    messages=${messages.replaceAll("\n", "\n    ")},
    max_tokens=${body.max_tokens},
    temperature=${body.temperature},
    stream=True,
)
for chunk in stream:
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)`;
}

export function asJavaScript(base, body, files, needsKey) {
  const { request, marks } = marked(body, files);
  const json = JSON.stringify(request.messages, null, 2);
  const messages = files.reduce((text, file, index) => text.replace(JSON.stringify(marks[index]), () => `dataUrl(${JSON.stringify(file.name)}, ${JSON.stringify(file.kind)})`), json);
  const key = needsKey ? "process.env.TRIPTYCH_API_KEY" : '"none"';
  const reader = files.length ? `import { readFileSync } from "node:fs";\n` : "";
  const helper = files.length ? 'const dataUrl = (name, kind) => `data:${kind};base64,${readFileSync(name).toString("base64")}`;\n' : "";
  return `// npm install openai
${reader}import OpenAI from "openai";

${helper}const client = new OpenAI({ baseURL: "${base}v1", apiKey: ${key} });
const stream = await client.chat.completions.create({
  model: ${JSON.stringify(body.model)},
  messages: ${messages.replaceAll("\n", "\n  ")},
  max_tokens: ${body.max_tokens},
  temperature: ${body.temperature},
  stream: true,
});
for await (const chunk of stream) process.stdout.write(chunk.choices[0]?.delta.content ?? "");`;
}

/** A command that repeats a request of the list; its content isn't known, and is left for the reader to fill in. */
export function repeatCurl(base, request, model, needsKey) {
  const media = Array.from({ length: request.num_items }, () => ({ type: "image_url", image_url: { url: "URL OF A PICTURE" } }));
  const content = media.length ? [...media, { type: "text", text: "YOUR TEXT" }] : "YOUR TEXT";
  const settings = { model, max_tokens: Math.max(1, request.num_tokens) };
  const bodies = {
    "/v1/chat/completions": { ...settings, messages: [{ role: "user", content }] },
    "/v1/completions": { ...settings, prompt: "YOUR TEXT" },
    "/v1/responses": { model, max_output_tokens: settings.max_tokens, input: "YOUR TEXT" },
  };
  const path = request.endpoint in bodies ? request.endpoint : "/v1/chat/completions";
  const key = needsKey ? ` \\\n  -H "Authorization: Bearer $TRIPTYCH_API_KEY"` : "";
  return `curl ${base}${path.slice(1)}${key} \\\n  -H 'Content-Type: application/json' \\\n  -d ${shellQuoted(JSON.stringify(bodies[path], null, 2))}`;
}
