// LangChain.js, through openai-node 6 or 7, ollama's client, and Cohere's.
const { serve } = await import(process.argv[1]);

const makers = {
  async openai({ url, model, key, options }) {
    const { OpenAIEmbeddings } = await import("@langchain/openai");
    return new OpenAIEmbeddings({ model, apiKey: key, configuration: { baseURL: url }, ...options });
  },
  async ollama({ url, model, options }) {
    const { OllamaEmbeddings } = await import("@langchain/ollama");
    return new OllamaEmbeddings({ model, baseUrl: url, ...options });
  },
  async cohere({ url, model, key, options }) {
    const { CohereEmbeddings } = await import("@langchain/cohere");
    const { CohereClient } = await import("cohere-ai");
    return new CohereEmbeddings({ model, client: new CohereClient({ token: key, environment: url }), ...options });
  },
};

const embeddings = ({ api = "openai", model = "all-MiniLM-L6-v2", key = "unused", options = {}, ...rest }) =>
  makers[api]({ model, key, options, ...rest });

await serve({
  async embedQueries({ texts, ...rest }) {
    const made = await embeddings(rest);
    return Promise.all(texts.map((text) => made.embedQuery(text)));
  },
  embedDocuments: async ({ texts, ...rest }) => (await embeddings(rest)).embedDocuments(texts),
});
