// Ollama's SDK for node.
const { serve } = await import(process.argv[1]);
const { Ollama } = await import("ollama");

await serve({
  embed: async ({ url, body }) => (await new Ollama({ host: url }).embed(body)).embeddings,
  embeddings: async ({ url, body }) => [(await new Ollama({ host: url }).embeddings(body)).embedding],
  list: async ({ url }) => (await new Ollama({ host: url }).list()).models.map((model) => model.name),
});
