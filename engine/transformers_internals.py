"""Internals of transformers that the engine uses. Only this module imports them."""

from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

__all__ = ["AttentionMaskInterface", "bytes_to_unicode", "sdpa_attention_forward", "sdpa_mask"]
