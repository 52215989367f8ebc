// The Node client's embeddings, which it asks for in base64: of one text, of several, as numbers, an error.
import OpenAI from 'openai';

const client = new OpenAI({ maxRetries: 0 });
const ask = { model: 'tiny-embed', input: ['hello there', 'what is a proxy?'] };
const told = (r) => JSON.stringify([r.object, r.model, r.data.map((d) => [d.index, d.embedding.length, d.embedding.slice(0, 4).map((x) => x.toFixed(2))]), r.usage.prompt_tokens]);

console.log('one', told(await client.embeddings.create({ ...ask, input: 'hello there' })));
console.log('several', told(await client.embeddings.create(ask)));
console.log('as numbers', told(await client.embeddings.create({ ...ask, encoding_format: 'float' })));
try {
  await client.embeddings.create({ ...ask, model: 'nope' });
} catch (e) {
  console.log('error', e.constructor.name, e.status);
}
