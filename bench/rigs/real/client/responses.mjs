// The forms of the Node client's responses, with answers that can be compared: plain, streamed, a tool call, an error.
import OpenAI from 'openai';

const client = new OpenAI({ maxRetries: 0 });
const ask = { model: 'tiny', input: 'Say this is a test', temperature: 0, max_output_tokens: 24 };
const weather = {
  type: 'function', name: 'weather', strict: false,
  parameters: { type: 'object', additionalProperties: false, required: ['city'], properties: { city: { type: 'string', enum: ['Paris', 'Oslo'] } } },
};
const told = (r) => [r.status, r.usage.input_tokens, r.usage.output_tokens].join(' ');

const whole = await client.responses.create(ask);
console.log('plain', JSON.stringify(whole.output_text), told(whole));

let text = '';
let last;
for await (const event of await client.responses.create({ ...ask, stream: true })) {
  if (event.type === 'response.output_text.delta') text += event.delta;
  last = event;
}
console.log('streamed', JSON.stringify(text), last.type, told(last.response));

const forced = { ...ask, max_output_tokens: 100, tools: [weather], tool_choice: 'required' };
try {
  const call = (await client.responses.create(forced)).output.find((item) => item.type === 'function_call');
  console.log('tool', call?.name, call?.arguments);
  let args = '';
  for await (const event of await client.responses.create({ ...forced, stream: true })) {
    if (event.type === 'response.function_call_arguments.delta') args += event.delta;
  }
  console.log('streamed tool', args);
} catch (e) {
  console.log('no tool', e.constructor.name, e.status);
}

try {
  await client.responses.create({ ...ask, model: 'nope' });
} catch (e) {
  console.log('error', e.constructor.name, e.status);
}
