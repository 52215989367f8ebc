"""rollout.py URL: 64 prompts with 8 samples each, in one request, and each by itself."""

import concurrent.futures
import json
import sys
import zlib

import requests

url = sys.argv[1]
params = {"temperature": 0.8, "max_new_tokens": 16, "n": 8}
prompts = [[3 + (31 * i + 7 * j) % 1000 for j in range(20 + i)] for i in range(64)]


def ask(input_ids):
    r = requests.post(url + "/generate", json={"input_ids": input_ids, "sampling_params": params, "return_logprob": True}, timeout=600)
    r.raise_for_status()
    return [(a["text"], a["output_ids"], a["meta_info"]["output_token_logprobs"], a["meta_info"]["prompt_tokens"]) for a in r.json()]


together = ask(prompts)
with concurrent.futures.ThreadPoolExecutor(16) as pool:
    apart = [a for answers in pool.map(ask, prompts) for a in answers]
sums = [zlib.crc32(json.dumps(answers).encode()) for answers in (together, apart)]
print(json.dumps({"answers": len(together) + len(apart), "tokens": sum(len(a[1]) for a in together + apart), "sums": sums}))
