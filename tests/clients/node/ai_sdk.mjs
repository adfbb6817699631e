// The AI SDK over /v1/responses and /v1/messages: what it gets, as a line of JSON; test_node.py holds it against the
// model. Address, key and question are given.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const [baseURL, apiKey, question] = process.argv.slice(2);
const models = {
  responses: createOpenAI({ baseURL, apiKey })("demo"),
  messages: createAnthropic({ baseURL, apiKey })("demo"),
};
const options = { maxRetries: 0, temperature: 0 };

async function asked(model) {
  const whole = await generateText({ ...options, model, prompt: question, maxOutputTokens: 40 });
  const stream = streamText({ ...options, model, prompt: question, maxOutputTokens: 40 });
  let streamed = "";
  for await (const piece of stream.textStream) streamed += piece;
  const get_weather = tool({
    description: "The weather of a city, now.",
    inputSchema: z.object({ city: z.enum(["Aachen", "Bonn", "Cologne"]), days: z.number().int().min(1).max(9) }),
    execute: async ({ city }) => `clear in ${city}`,
  });
  const called = await generateText({
    ...options, model, prompt: question, maxOutputTokens: 200, tools: { get_weather }, stopWhen: stepCountIs(2),
    toolChoice: { type: "tool", toolName: "get_weather" },
    prepareStep: ({ stepNumber }) => (stepNumber ? { toolChoice: "none" } : {}),
  });
  const schema = z.object({ size: z.enum(["small", "large"]), deep: z.boolean() });
  const parsed = await generateObject({ ...options, model, prompt: question, maxOutputTokens: 300, schema });
  return {
    whole: whole.text, tokens: whole.usage.outputTokens, reason: whole.finishReason, streamed,
    calls: called.steps[0].toolCalls.map((call) => [call.toolName, call.input]),
    results: called.steps[0].toolResults.map((result) => result.output), answer: called.text, parsed: parsed.object,
  };
}

const found = {};
for (const [name, model] of Object.entries(models)) found[name] = await asked(model);
console.log(JSON.stringify(found));
