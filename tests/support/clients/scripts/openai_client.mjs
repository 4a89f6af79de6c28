// openai-node: the newest, the newest that node 20 takes, and 4.x. Up to 6.x they make zeros of floats where they have
// asked for base64.
const { serve } = await import(process.argv[1]);

async function client({ major, url, key = "unused", maxRetries = 0 }) {
  const library = await import(major === 4 ? "openai-4" : "openai");
  return new library.default({ baseURL: url, apiKey: key, maxRetries });
}

await serve({
  async create({ body, ...options }) {
    const answer = await (await client(options)).embeddings.create(body);
    return { vectors: answer.data.map((item) => item.embedding), model: answer.model, usage: answer.usage };
  },
  async models(options) {
    const ids = [];
    for await (const model of (await client(options)).models.list()) ids.push(model.id);
    return ids;
  },
});
