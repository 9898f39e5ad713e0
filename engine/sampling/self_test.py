"""Self-test of a loaded model: a few tokens, computed by transformers and in all ways in which the engine computes."""

from __future__ import annotations

import textwrap

import torch
from torch import Tensor

from engine.compute.base import BaseModel
from engine.compute.datum import Datum
from engine.compute.lora import LoraSpec
from engine.compute.loss import bind_loss
from engine.compute.train import exhaust, iterate_loss
from engine.models import LoadedModel, ModelError
from engine.sampling.batch import Batch
from engine.sampling.job import SampleJob
from engine.sampling.request import SamplingRequest

NUM_TOKENS = 8
NUM_SAMPLED = 3  # the first token is computed with the prompt, the others with cached keys and values

# Allowed differences, as shares of the largest logit. In bfloat16, rounding can change the choice of experts.
_EXACT = 1e-3
_ROUNDED_LOGITS = 0.02
_ROUNDED_SAMPLES = 0.1


def checked_base(loaded: LoadedModel) -> BaseModel:
    """Wrap a loaded model for training and sampling.

    The engine replaces linear layers, computes the output head itself and keeps keys and values in its own cache. Some
    architectures do not allow this, and would fail at a request or give wrong numbers.

    Raises:
        ModelError: the engine cannot compute the model, or computes other numbers than transformers.
    """
    tokens_T = torch.randint(loaded.vocab_size, (NUM_TOKENS,), generator=torch.Generator().manual_seed(0))
    is_exact = loaded.dtype == "float32"
    try:
        with torch.no_grad(), loaded.autocast():
            logits_TV = loaded.model(input_ids=tokens_T[None].to(loaded.device), use_cache=False).logits[0].float()
        base = BaseModel(loaded)
        scale = logits_TV.abs().max().item()
        if not _worst(_logits(base, tokens_T), logits_TV) <= scale * (_EXACT if is_exact else _ROUNDED_LOGITS):
            raise _unsupported(loaded, "its logits are not the product of its last hidden states and its output head")
        _train(base, tokens_T)
        if not _sampled_difference(base, tokens_T) <= scale * (_EXACT if is_exact else _ROUNDED_SAMPLES):
            raise _unsupported(loaded, "cached keys and values change the logprobs of its samples")
    except ModelError:
        raise
    except Exception as error:  # every architecture of transformers has failures of its own
        reason = textwrap.shorten(str(error) or type(error).__name__, width=200).rstrip(".")
        raise _unsupported(loaded, f"a test of a few tokens failed ({reason})") from error
    return base


def _logits(base: BaseModel, tokens_T: Tensor) -> Tensor:
    with torch.no_grad(), base.using(None):
        return base.logits(base.hidden(tokens_T[None].to(base.device))[0])


def _train(base: BaseModel, tokens_T: Tensor) -> None:
    """Compute a loss and its gradient in a new adapter of all modules."""
    loss = bind_loss("cross_entropy", {})
    data = [loss.prepare(Datum(tokens_T, tokens_T, {}), 0)]
    exhaust(iterate_loss(base, base.new_adapter(LoraSpec(1, 0)), data, loss, NUM_TOKENS, backward=True))


def _sampled_difference(base: BaseModel, tokens_T: Tensor) -> float:
    """Sample a few tokens; return the largest difference between their logprobs and those of a pass without cache."""
    job = SampleJob(tokens_T, 1, NUM_SAMPLED, 1.0, base.loaded.vocab_size, 1.0, frozenset(), (), 0)
    (row,) = SamplingRequest(job, None).rows
    batch = Batch(base, 0, NUM_TOKENS, deterministic=True)  # without CUDA graphs
    batch.add([row])
    while batch.rows:
        batch.step()
    sampled_S = row.context_T()[NUM_TOKENS:]
    logprobs_SV = _logits(base, row.context_T()[:-1])[NUM_TOKENS - 1 :].log_softmax(dim=-1).cpu()
    return _worst(torch.tensor(row.logprobs), logprobs_SV.gather(1, sampled_S[:, None])[:, 0])


def _worst(computed: Tensor, expected: Tensor) -> float:
    return (computed - expected).abs().max().item()


def _unsupported(loaded: LoadedModel, reason: str) -> ModelError:
    architecture = loaded.model.config.get_text_config().model_type
    return ModelError(f"This engine cannot compute {loaded.name} ({architecture}): {reason}; use another model.")
