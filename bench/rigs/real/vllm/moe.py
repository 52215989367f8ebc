# moe.py DIR: a tiny MoE model with random weights and its tokenizer, for an engine whose steps are measured.
import glob
import itertools
import sys
import sysconfig

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

out = sys.argv[1]

# A byte-level BPE: every text can be said, and the texts of one token are those of one source tree.
corpus = [open(f, errors="replace").read() for f in itertools.islice(sorted(glob.glob(sysconfig.get_paths()["stdlib"] + "/*.py")), 60)]
t = Tokenizer(models.BPE())
t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
t.decoder = decoders.ByteLevel()
special = ["<pad>", "<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>"]
t.train_from_iterator(corpus, trainers.BpeTrainer(vocab_size=1024, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
f = PreTrainedTokenizerFast(tokenizer_object=t, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
f.chat_template = ("{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}</s>{% endfor %}"
                   "{% if add_generation_prompt %}<|assistant|>{% endif %}")

torch.manual_seed(7)
# A KV token takes 1 KB a layer for 64 query heads: reading it costs little and attending to it much, so that a step is bound by the rank's own
# core and not by the memory that both cores share.
model = Qwen3MoeForCausalLM(Qwen3MoeConfig(
    vocab_size=1024, bos_token_id=1, eos_token_id=2, pad_token_id=0, tie_word_embeddings=False, hidden_size=256, intermediate_size=256,
    moe_intermediate_size=128, num_hidden_layers=2, num_attention_heads=64, num_key_value_heads=2, head_dim=64, num_experts=4, num_experts_per_tok=2,
    decoder_sparse_step=1, mlp_only_layers=[], norm_topk_prob=True, max_position_embeddings=32768, initializer_range=0.1))
model.save_pretrained(out)
f.save_pretrained(out)
