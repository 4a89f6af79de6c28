// Cohere's SDK for node: the clients of its first and second API.
const { serve } = await import(process.argv[1]);
const { CohereClient, CohereClientV2 } = await import("cohere-ai");

await serve({
  async embed({ url, body, key = "unused" }) {
    const client = new CohereClientV2({ token: key, environment: url });
    return (await client.embed(body, { maxRetries: 0 })).embeddings;
  },
  async embedFirstApi({ url, body, key = "unused" }) {
    const client = new CohereClient({ token: key, environment: url });
    const answer = await client.embed(body, { maxRetries: 0 });
    return { kind: answer.responseType, vectors: answer.embeddings };
  },
  async rerank({ url, body }) {
    const client = new CohereClientV2({ token: "unused", environment: url });
    const answer = await client.rerank({ model: "m", ...body }, { maxRetries: 0 });
    return answer.results.map((result) => [result.index, result.relevanceScore]);
  },
});
