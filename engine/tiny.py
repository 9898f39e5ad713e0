"""`tiny`: a byte-level tokenizer and a small random Llama, so that tests and first steps need no download."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

VERSION = 1  # a part of the cache's name: raise it with every change of what `write` makes

MAX_CONTEXT = 4096
NUM_BYTES = 256
# The padding to a multiple of 8 has names too: whatever id a random model samples can be decoded.
SPECIALS = ("<|bos|>", "<|im_start|>", "<|im_end|>", "<|pad|>", *(f"<|reserved_{i}|>" for i in range(4)))

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write(directory: Path) -> None:
    """Write config, weights and tokenizer into ``directory``: the same bytes every time."""
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(directory)
    random_llama(tokenizer).save_pretrained(directory)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Ids 0 to 255 are the bytes of the UTF-8 text, the special tokens follow; decoding is the exact inverse.

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
    """A two-layer Llama with grouped-query attention, random from a fixed seed."""
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
                # Uniform, because a normal draw differs in its last bits between processors. Of variance
                # 1 / hidden: with the usual 0.02 ** 2 the logits stay near zero and no adapter learns.
                uniform = torch.rand(weight.shape, generator=generator)
                weight.copy_((2 * uniform - 1) * (3 / hidden) ** 0.5)
    return model
