// The main paths of OpenAI's JavaScript client against a server whose address is the first argument; prints one JSON document.
import OpenAI from "openai";

const [baseURL, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "Say something." }];
const common = { model, temperature: 0, max_tokens: 12 };

const listed = [];
for await (const one of client.models.list()) listed.push(one.id);

const whole = await client.chat.completions.create({ ...common, messages });

let streamed = "";
let usage = null;
const stream = await client.chat.completions.create({
  ...common, messages, stream: true, stream_options: { include_usage: true },
});
for await (const chunk of stream) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
}

const completion = await client.completions.create({ ...common, prompt: "Once upon" });
const response = await client.responses.create({ model, input: "Say something.", temperature: 0, max_output_tokens: 12 });

let eventText = "";
const events = await client.responses.create({
  model, input: "Say something.", temperature: 0, max_output_tokens: 12, stream: true,
});
for await (const event of events) if (event.type === "response.output_text.delta") eventText += event.delta;

let refused = null;
try {
  await client.chat.completions.create({ ...common, messages, temperature: 1000 });
} catch (error) {
  refused = { kind: error.constructor.name, status: error.status, param: error.param };
}

const left = new AbortController();
const long = await client.chat.completions.create(
  { ...common, max_tokens: 300, messages, stream: true }, { signal: left.signal },
);
for await (const _ of long) { left.abort(); break; }

console.log(JSON.stringify({
  listed, whole: whole.choices[0].message.content, streamed, usage, completion: completion.choices[0].text,
  response: response.output_text, eventText, refused,
}));
