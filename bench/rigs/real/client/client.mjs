// The forms of the Node client that its README shows, with answers that can be compared: plain, streamed, its stream helper, a tool call, a parsed
// answer, errors, and an answer that is given up.
import OpenAI from 'openai';

const client = new OpenAI({ maxRetries: 0 });
const ask = { model: 'tiny', temperature: 0, max_tokens: 40, messages: [{ role: 'user', content: 'Say this is a test' }] };
const weather = {
  type: 'function',
  function: {
    name: 'weather',
    parameters: {
      type: 'object', additionalProperties: false, required: ['city'],
      properties: { city: { type: 'string', enum: ['Paris', 'Oslo'] } },
    },
  },
};
const forced = { max_tokens: 100, tools: [weather], tool_choice: { type: 'function', function: { name: 'weather' } } };

console.log('plain', JSON.stringify((await client.chat.completions.create(ask)).choices[0].message.content));

let text = '';
for await (const chunk of await client.chat.completions.create({ ...ask, stream: true })) text += chunk.choices[0]?.delta?.content ?? '';
console.log('streamed', JSON.stringify(text));

const runner = client.chat.completions.stream({ ...ask, stream_options: { include_usage: true } });
let deltas = '';
runner.on('content', (delta) => (deltas += delta));
const whole = await runner.finalChatCompletion();
console.log('helper', deltas === whole.choices[0].message.content, JSON.stringify(whole.choices[0].message.content), whole.choices[0].finish_reason, whole.usage.completion_tokens);

const call = (await client.chat.completions.create({ ...ask, ...forced })).choices[0].message.tool_calls[0].function;
console.log('tool', call.name, call.arguments);

const streamedCall = (await client.chat.completions.stream({ ...ask, ...forced }).finalChatCompletion()).choices[0].message.tool_calls[0].function;
console.log('streamed tool', streamedCall.name, streamedCall.arguments);

const schema = { type: 'object', additionalProperties: false, required: ['sure'], properties: { sure: { type: 'boolean' } } };
const format = { type: 'json_schema', json_schema: { name: 'verdict', strict: true, schema } };
try {
  const parsed = await client.chat.completions.parse({ ...ask, max_tokens: 100, response_format: format });
  console.log('parsed', JSON.stringify(parsed.choices[0].message.parsed));
} catch (e) {
  console.log('not parsed', e.constructor.name, e.message);
}

const { text: completed, logprobs, finish_reason } = (await client.completions.create({ model: 'tiny', temperature: 0, max_tokens: 10, prompt: 'Say this is a test', logprobs: 1 })).choices[0];
console.log('completion', JSON.stringify([completed, logprobs.tokens, logprobs.token_logprobs, finish_reason]));

for (const wrong of [{ ...ask, model: 'nope' }, { ...ask, temperature: -1 }]) {
  try {
    await client.chat.completions.create(wrong);
  } catch (e) {
    console.log('error', e.constructor.name, e.status);
  }
}

const left = await client.chat.completions.create({ ...ask, max_tokens: 1500, ignore_eos: true, stream: true });
for await (const chunk of left) {
  if (chunk.choices[0]?.delta?.content) break; // the client closes the connection
}
console.log('left');
for (const m of (await client.models.list()).data) console.log('model', m.id);
