// @huggingface/inference, pointed at an endpoint of its own.
const { serve } = await import(process.argv[1]);
const { InferenceClient } = await import("@huggingface/inference");

const client = (url) => new InferenceClient("hf_unused", { endpointUrl: url });

await serve({
  featureExtraction: ({ url, body }) => client(url).featureExtraction(body),
  textClassification: ({ url, body }) => client(url).textClassification(body),
  tokenClassification: ({ url, body }) => client(url).tokenClassification(body),
});
