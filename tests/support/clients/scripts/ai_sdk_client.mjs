// Vercel's AI SDK with its provider for OpenAI-compatible servers.
const { serve } = await import(process.argv[1]);
const { embed, embedMany } = await import("ai");
const { createOpenAICompatible } = await import("@ai-sdk/openai-compatible");

function model({ url, name = "all-MiniLM-L6-v2", key }) {
  return createOpenAICompatible({ name: "vecd", baseURL: url, apiKey: key }).embeddingModel(name);
}

await serve({
  async embed({ texts: [value], ...rest }) {
    const { embedding, usage } = await embed({ model: model(rest), value, maxRetries: 0 });
    return { vectors: [embedding], tokens: usage.tokens };
  },
  async embedMany({ texts, ...rest }) {
    const { embeddings, usage } = await embedMany({ model: model(rest), values: texts, maxRetries: 0 });
    return { vectors: embeddings, tokens: usage.tokens };
  },
});
