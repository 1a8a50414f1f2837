// Vercel's AI SDK: a loop of tools, whole and streamed, and a typed answer together with tools.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const model = createOpenAICompatible({
  name: "headlong",
  baseURL: `${process.env.HEADLONG_URL}/v1`,
  apiKey: "none",
  includeUsage: true,
  supportsStructuredOutputs: true,
})("tale-20m");
const called = [];
const look = tool({
  description: "Look at something.",
  inputSchema: z.object({ at: z.enum(["sea", "sky"]) }),
  execute: async ({ at }) => {
    called.push(at);
    return "It is blue.";
  },
});
const asked = {
  model,
  prompt: "Look at the sea, then tell me a story.",
  tools: { look },
  stopWhen: stepCountIs(3),
  maxRetries: 0,
};
const Weather = z.object({ mood: z.enum(["calm", "rough"]), degrees: z.literal([10, 20]) });

const whole = await generateText(asked);
const streamed = streamText({ ...asked, onError: ({ error }) => { throw error; } });
const typed = await generateText({ ...asked, output: Output.object({ schema: Weather }) });
console.log(
  JSON.stringify({
    called,
    texts: [whole.text, await streamed.text],
    forms: [typed.output],
    usage: (await streamed.totalUsage).outputTokens,
  }),
);
process.exit(0);
