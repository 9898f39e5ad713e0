"""One training example, and the check that a model can take it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from engine.errors import RequestError


@dataclass(frozen=True, slots=True)
class Datum:
    """One sequence with what it is to predict.

    Attributes:
        tokens_T: int64 ``(T,)``: the model's input.
        targets: int64 ``(T,)`` or ``(T, K)``: the token, or the K tokens, scored at each position.
        inputs: what the loss reads beside, by the names of ``loss_fn_inputs``.
    """

    tokens_T: Tensor
    targets: Tensor
    inputs: Mapping[str, Tensor]


def check_datum(datum: Datum, index: int, vocab_size: int, max_context: int) -> None:
    """Raise a RequestError that names datum ``index`` unless the model can train on it."""
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


def check_tokens(tokens: Tensor, where: str, vocab_size: int) -> None:
    """Raise a RequestError unless all ids are below ``vocab_size``."""
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= vocab_size:
        raise RequestError(
            f"{where} holds the token id {low if low < 0 else high}, but the model's vocabulary has "
            f"{vocab_size} entries: encode with the tokenizer of this model."
        )
