# The Python client's embeddings, which it asks for in base64: of one text, of several, as numbers, an error.
from openai import OpenAI

client = OpenAI(max_retries=0)
ask = dict(model="tiny-embed", input=["hello there", "what is a proxy?"])


def told(r):
    return r.object, r.model, [(d.index, len(d.embedding), [round(x, 2) for x in d.embedding[:4]]) for d in r.data], r.usage.prompt_tokens, r.usage.total_tokens


print("one", *told(client.embeddings.create(**{**ask, "input": "hello there"})))
print("several", *told(client.embeddings.create(**ask)))
print("as numbers", *told(client.embeddings.create(**ask, encoding_format="float")))
for wrong in (dict(model="nope"), dict(input=5)):
    try:
        client.embeddings.create(**{**ask, **wrong})
    except Exception as e:
        print("error", type(e).__name__, e.status_code)
