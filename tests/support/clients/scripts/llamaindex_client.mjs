// LlamaIndex.TS.
const { serve } = await import(process.argv[1]);

const model = "all-MiniLM-L6-v2";
const makers = {
  async openai({ url, key = "unused", options = {} }) {
    const { OpenAIEmbedding } = await import("@llamaindex/openai");
    return new OpenAIEmbedding({ model, apiKey: key, baseURL: `${url}/v1`, maxRetries: 0, ...options });
  },
  async ollama({ url }) {
    const { OllamaEmbedding } = await import("@llamaindex/ollama");
    return new OllamaEmbedding({ model, config: { host: url } });
  },
};

await serve({
  async embedQueries({ api, texts, ...rest }) {
    const embedding = await makers[api](rest);
    return Promise.all(texts.map((text) => embedding.getQueryEmbedding({ type: "text", text })));
  },
  embedTexts: async ({ api, texts, ...rest }) => (await makers[api](rest)).getTextEmbeddingsBatch(texts),
});
