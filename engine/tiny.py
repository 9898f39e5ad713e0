"""`tiny`: a byte-level tokenizer and a small random Llama, for tests and first steps without a download."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from engine.transformers_internals import bytes_to_unicode

VERSION = 1  # part of the cache directory's name: increase it whenever the output of `write` changes

MAX_CONTEXT = 4096
NUM_BYTES = 256
# Reserved tokens pad the vocabulary to a multiple of 8.
SPECIALS = ("<|bos|>", "<|im_start|>", "<|im_end|>", "<|pad|>", *(f"<|reserved_{i}|>" for i in range(4)))

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write(directory: Path) -> None:
    """Write config, weights and tokenizer into ``directory``, byte for byte reproducibly."""
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(directory)
    random_llama(tokenizer).save_pretrained(directory)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Tokenizer with one id per UTF-8 byte (0 to 255), then the special tokens. Decoding an encoded text returns it.

    >>> tokenizer = byte_tokenizer()
    >>> tokenizer.encode("a é<|im_end|>")
    [97, 32, 195, 169, 258]
    >>> tokenizer.decode([97, 32, 195, 169, 258])
    'a é<|im_end|>'
    """
    alphabet = bytes_to_unicode()
    tokenizer = Tokenizer(BPE(vocab={alphabet[byte]: byte for byte in range(NUM_BYTES)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIALS))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|bos|>",
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_CONTEXT,
    )
    fast.chat_template = CHATML
    return fast


def random_llama(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Two-layer Llama with grouped-query attention and random weights from a fixed seed."""
    hidden = 32
    config = LlamaConfig.from_dict(
        {
            "vocab_size": len(tokenizer),
            "hidden_size": hidden,
            "intermediate_size": 2 * hidden,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": MAX_CONTEXT,
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        }
    )
    with torch.random.fork_rng(devices=[]):
        model = LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2:
                # Uniform, because normal draws differ in their last bits between processors. The variance is
                # 1 / hidden: with the usual 0.02 ** 2 the logits stay near zero and adapters do not learn.
                uniform = torch.rand(weight.shape, generator=generator)
                weight.copy_((2 * uniform - 1) * (3 / hidden) ** 0.5)
    return model
