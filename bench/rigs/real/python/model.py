"""Makes the model that the engines serve: a Llama of two layers with random weights and a tokenizer trained on Python's own library.

The weights are seeded, and large enough (initializer_range) that greedy answers differ from prompt to prompt.
"""

import glob
import itertools
import sys
import sysconfig

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

out = sys.argv[1]
special = ["<pad>", "<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>"]
sources = itertools.islice(sorted(glob.glob(sysconfig.get_paths()["stdlib"] + "/*.py")), 60)
corpus = [open(name, errors="replace").read() for name in sources]

tokenizer = Tokenizer(models.BPE())
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
alphabet = pre_tokenizers.ByteLevel.alphabet()
tokenizer.train_from_iterator(corpus, trainers.BpeTrainer(vocab_size=1024, special_tokens=special, initial_alphabet=alphabet))
fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
fast.chat_template = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
fast.save_pretrained(out)

torch.manual_seed(7)
config = LlamaConfig(
    vocab_size=1024,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=32,
    max_position_embeddings=4096,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
    tie_word_embeddings=False,
    initializer_range=0.3,
)
LlamaForCausalLM(config).save_pretrained(out)
