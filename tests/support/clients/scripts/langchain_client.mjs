// LangChain.js, through openai-node 6.
const { serve } = await import(process.argv[1]);
const { OpenAIEmbeddings } = await import("@langchain/openai");

const embeddings = ({ url, model = "all-MiniLM-L6-v2", key = "unused", options = {} }) =>
  new OpenAIEmbeddings({ model, apiKey: key, configuration: { baseURL: url }, ...options });

await serve({
  embedQuery: async ({ text, ...rest }) => [await embeddings(rest).embedQuery(text)],
  embedDocuments: ({ texts, ...rest }) => embeddings(rest).embedDocuments(texts),
});
