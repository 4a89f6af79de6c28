// @huggingface/inference, pointed at an endpoint of its own.
const { serve } = await import(process.argv[1]);
const { InferenceClient } = await import("@huggingface/inference");

await serve({
  featureExtraction: ({ url, body }) => new InferenceClient("hf_unused", { endpointUrl: url }).featureExtraction(body),
});
