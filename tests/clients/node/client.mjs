// openai-node: what it gets, as a line of JSON; test_node.py holds it against the model. URL, key and question are given,
// or instead of a question the JSON of a request with tools.
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const [baseURL, apiKey, question, tools] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey, maxRetries: 0 });
const asked = { model: "demo", messages: [{ role: "user", content: question }], temperature: 0 };

async function streamed() {
  const pieces = [];
  let usage = null;
  const options = { stream: true, stream_options: { include_usage: true }, max_tokens: 40 };
  for await (const chunk of await client.chat.completions.create({ ...asked, ...options })) {
    if (chunk.choices.length) pieces.push(chunk.choices[0].delta.content ?? "");
    usage = chunk.usage ?? usage;
  }
  return { pieces, usage };
}

async function helper() {
  const stream = client.chat.completions.stream({ ...asked, max_tokens: 40 });
  let text = "";
  stream.on("content", (piece) => { text += piece; });
  const final = await stream.finalChatCompletion();
  return { text, final: final.choices[0].message.content };
}

async function parsed() {
  const Answer = z.object({ size: z.enum(["small", "large"]), deep: z.boolean() });
  const format = zodResponseFormat(Answer, "answer");
  const answer = await client.chat.completions.parse({ ...asked, max_tokens: 300, response_format: format });
  return answer.choices[0].message.parsed;
}

async function called() {
  const asked = JSON.parse(tools);
  const whole = (await client.chat.completions.create(asked)).choices[0];
  const stream = client.chat.completions.stream({ ...asked, stream: true });
  const final = (await stream.finalChatCompletion()).choices[0];
  const named = ({ message }) => message.tool_calls.map((call) => [call.function.name, call.function.arguments]);
  return { whole: named(whole), streamed: named(final), end: [whole.finish_reason, final.finish_reason] };
}

async function aborted() {
  const stream = await client.completions.create({
    model: "demo", prompt: question, stream: true, max_tokens: 900, ignore_eos: true,
  });
  let chunks = 0;
  for await (const chunk of stream) {
    chunks += chunk.choices.length;
    if (chunks === 2) stream.controller.abort();
  }
  return chunks;
}

async function failure(work) {
  try {
    await work();
  } catch (error) {
    return { kind: error.constructor.name, status: error.status, code: error.code, param: error.param };
  }
  return null;
}

if (tools) {
  console.log(JSON.stringify(await called()));
  process.exit(0);
}
const whole = await client.chat.completions.create({ ...asked, max_completion_tokens: 40 });
const stranger = new OpenAI({ baseURL, apiKey: "sk-another-key", maxRetries: 0 });
console.log(JSON.stringify({
  models: (await client.models.list()).data.map((model) => model.id),
  whole: whole.choices[0].message.content,
  tokens: whole.usage.completion_tokens,
  streamed: await streamed(),
  helper: await helper(),
  parsed: await parsed(),
  aborted: await aborted(),
  wrong: await failure(() => client.chat.completions.create({ ...asked, temperature: -1 })),
  unknown: await failure(() => client.chat.completions.create({ ...asked, model: "gpt-9" })),
  refused: await failure(() => stranger.models.list()),
}));
