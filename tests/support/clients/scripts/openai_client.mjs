// openai-node: the newest that node 20 takes, and 4.x, which makes zeros of floats where it has asked for base64.
const { serve } = await import(process.argv[1]);
const libraries = { 6: await import("openai"), 4: await import("openai-4") };

function client({ major, url, key = "unused", maxRetries = 0 }) {
  return new libraries[major].default({ baseURL: url, apiKey: key, maxRetries });
}

await serve({
  async create({ body, ...options }) {
    const answer = await client(options).embeddings.create(body);
    return { vectors: answer.data.map((item) => item.embedding), model: answer.model, usage: answer.usage };
  },
  async models(options) {
    const ids = [];
    for await (const model of client(options).models.list()) ids.push(model.id);
    return ids;
  },
});
