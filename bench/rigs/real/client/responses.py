# The forms of the Python client's responses, with answers that can be compared: plain, streamed, a tool call, a conversation, errors.
from openai import OpenAI

client = OpenAI(max_retries=0)
ask = dict(model="tiny", input="Say this is a test", temperature=0, max_output_tokens=24)
weather = {
    "type": "function",
    "name": "weather",
    "strict": False,
    "parameters": {
        "type": "object", "additionalProperties": False, "required": ["city"],
        "properties": {"city": {"type": "string", "enum": ["Paris", "Oslo"]}},
    },
}


def told(r):
    return r.status, r.usage.input_tokens, r.usage.output_tokens, r.usage.total_tokens


r = client.responses.create(**ask)
print("plain", repr(r.output_text), *told(r))

text, kinds = "", []
for event in client.responses.create(**ask, stream=True):
    if event.type == "response.output_text.delta":
        text += event.delta
    if not kinds or kinds[-1] != event.type:
        kinds.append(event.type)
    last = event
print("streamed", repr(text), kinds, *told(last.response), last.response.output_text == text)

talk = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}, {"role": "user", "content": [{"type": "input_text", "text": "what is a proxy?"}]}]
r = client.responses.create(**{**ask, "input": talk}, instructions="be brief")
print("conversation", repr(r.output_text), *told(r))

for choice in ("required", {"type": "function", "name": "weather"}):
    try:
        r = client.responses.create(**{**ask, "max_output_tokens": 100}, tools=[weather], tool_choice=choice)
        print("tool", [(i.type, getattr(i, "name", None), getattr(i, "arguments", None)) for i in r.output], *told(r))
        args = ""
        for event in client.responses.create(**{**ask, "max_output_tokens": 100}, tools=[weather], tool_choice=choice, stream=True):
            if event.type == "response.function_call_arguments.delta":
                args += event.delta
        print("streamed tool", args)
    except Exception as e:
        print("no tool", type(e).__name__, getattr(e, "status_code", None))

for wrong in (dict(model="nope"), dict(temperature=-1)):
    try:
        client.responses.create(**{**ask, **wrong})
    except Exception as e:
        print("error", type(e).__name__, e.status_code)

for event in client.responses.create(**{**ask, "max_output_tokens": 1500}, stream=True, extra_body={"ignore_eos": True}):
    if event.type == "response.output_text.delta":
        break  # the client closes the connection
print("left")
