# The forms of Anthropic's Python client, with answers that can be compared: plain, streamed, a conversation, tools, counts, errors.
from anthropic import Anthropic

client = Anthropic(max_retries=0)
ask = dict(model="tiny", messages=[{"role": "user", "content": "Say this is a test"}], max_tokens=24, extra_body={"temperature": 0})
weather = {
    "name": "weather", "description": "The weather of a city.",
    "input_schema": {
        "type": "object", "additionalProperties": False, "required": ["city"],
        "properties": {"city": {"type": "string", "enum": ["Paris", "Oslo"]}},
    },
}


def told(m):
    u = m.usage
    return m.type, m.role, m.model, m.stop_reason, m.stop_sequence, u.input_tokens + (u.cache_read_input_tokens or 0), u.output_tokens


def blocks(m):
    return [(b.type, getattr(b, "text", None), getattr(b, "name", None), getattr(b, "input", None)) for b in m.content]


m = client.messages.create(**ask)
print("plain", blocks(m), *told(m), getattr(m, "kv_transfer_params", None))

text, kinds = "", []
for event in client.messages.create(**ask, stream=True):
    if event.type == "content_block_delta":
        text += event.delta.text
    if not kinds or kinds[-1] != event.type:
        kinds.append(event.type)
print("streamed", repr(text), kinds)

with client.messages.stream(**ask) as stream:
    helped = "".join(stream.text_stream)
    m = stream.get_final_message()
print("helped", helped == text, blocks(m), *told(m))

talk = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}, {"role": "user", "content": [{"type": "text", "text": "what is a proxy?", "cache_control": {"type": "ephemeral"}}]}]
m = client.messages.create(**{**ask, "messages": talk}, system=[{"type": "text", "text": "be brief"}], stop_sequences=["never said"], metadata={"user_id": "u"})
print("conversation", blocks(m), *told(m))

for choice in ({"type": "any"}, {"type": "tool", "name": "weather"}):
    try:
        forced = {**ask, "max_tokens": 100, "tools": [weather], "tool_choice": choice}
        m = client.messages.create(**forced)
        print("tool", blocks(m), *told(m))
        with client.messages.stream(**forced) as stream:
            m = stream.get_final_message()
        print("streamed tool", blocks(m), *told(m))
        call = next(b for b in m.content if b.type == "tool_use")
        back = ask["messages"] + [
            {"role": "assistant", "content": [{"type": "tool_use", "id": call.id, "name": call.name, "input": call.input}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "rain"}]}]},
        ]
        m = client.messages.create(**{**ask, "messages": back, "tools": [weather]})
        print("told of it", blocks(m), *told(m))
    except Exception as e:
        print("no tool", type(e).__name__, getattr(e, "status_code", None))

print("counted", client.messages.count_tokens(model="tiny", messages=talk, system="be brief", tools=[weather]).input_tokens)

for wrong in (dict(model="nope"), dict(extra_body={"temperature": -1}), dict(max_tokens=0)):
    try:
        client.messages.create(**{**ask, **wrong})
    except Exception as e:
        print("error", type(e).__name__, e.status_code)

for event in client.messages.create(**{**ask, "max_tokens": 1500}, stream=True):
    if event.type == "content_block_delta":
        break  # the client closes the connection
print("left")
