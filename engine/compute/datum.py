"""Training example and its validation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from engine.errors import RequestError


@dataclass(frozen=True, slots=True)
class Datum:
    """One sequence with its targets and loss inputs.

    Attributes:
        tokens_T: int64 ``(T,)``: the model's input.
        targets: int64 ``(T,)`` or ``(T, K)``: the token, or the K tokens, scored at each position.
        inputs: further inputs of the loss, by their names in ``loss_fn_inputs``.
    """

    tokens_T: Tensor
    targets: Tensor
    inputs: Mapping[str, Tensor]


def check_datum(datum: Datum, index: int, vocab_size: int, max_context: int) -> None:
    """Raise a RequestError that names datum ``index`` if the model cannot train on it."""
    num_tokens = len(datum.tokens_T)
    if num_tokens == 0:
        raise RequestError(f"Datum {index} has no tokens: drop it.")
    if num_tokens > max_context:
        raise RequestError(
            f"Datum {index} has {num_tokens} tokens, but the model's context is {max_context}: "
            "truncate it, or lower max_length."
        )
    shape = tuple(datum.targets.shape)
    if datum.targets.dim() not in (1, 2) or shape[0] != num_tokens or 0 in shape:
        raise RequestError(
            f"Datum {index} has {num_tokens} input tokens and target_tokens of shape {shape}: "
            f"send one target per input token, shape ({num_tokens},) or ({num_tokens}, K)."
        )
    for name, tokens in (("model_input", datum.tokens_T), ("target_tokens", datum.targets)):
        check_tokens(tokens, f"{name} of datum {index}", vocab_size)


def check_tokens(tokens: Tensor, name: str, vocab_size: int) -> None:
    """Raise a RequestError if a token id is outside the vocabulary; ``name`` is the tensor's name in the error."""
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= vocab_size:
        raise RequestError(
            f"{name} has the token id {low if low < 0 else high}, but the model's vocabulary has {vocab_size} "
            "entries: encode with the tokenizer of this model."
        )
