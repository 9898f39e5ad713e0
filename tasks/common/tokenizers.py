"""Thread-safe tokenizers, and evaluators that need a tokenizer and a sampling client."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from inspect import isfunction
from threading import RLock
from typing import ParamSpec, TypeVar

import tinker
from tinker_cookbook.eval.evaluators import SamplingClientEvaluator
from tinker_cookbook.tokenizer_utils import Tokenizer
from transformers import PreTrainedTokenizerBase

from blocks.garbage_collection import no_collections
from tasks.common.internals.cookbook import guard_tokenizers
from tasks.common.internals.transformers import import_auto_tokenizer

P = ParamSpec("P")
R = TypeVar("R")

# Text that distinguishes tokenizers.
_PROBE = "The answer is 1234.5 €;\n\tdef f(x): return x  # naïve 漢字 Ünïcode <|im_end|>"

# One lock for all tokenizers, because two of them may wrap the same Rust object.
_MUTEX = RLock()


@cache
def lock_tokenizers() -> None:
    """Make all tokenizers of this process thread-safe, including those that are already open.

    transformers reconfigures a fast tokenizer to encode with or without special tokens. It cannot reconfigure a
    tokenizer that another thread is using ("Already borrowed"), and a change between two calls of a thread changes the
    tokens. A slow tokenizer keeps state in Python, also in code that comes with its model. Environments, judges and the
    SDK open tokenizers of their own, so this function locks the methods of the tokenizer classes and of all subclasses
    that are defined later.

    The function also imports `AutoTokenizer`, which takes time, because a run calls it while its engine loads the
    model. In a deployment's run, `guard_tokenizers` keeps tinker-cookbook from running the code of a local folder.
    """
    guard_tokenizers()
    with no_collections():
        import_auto_tokenizer()

    for kind in _subclasses(PreTrainedTokenizerBase):
        _lock_class(kind)
    PreTrainedTokenizerBase.__init_subclass__ = classmethod(_lock_subclass)  # pyright: ignore[reportAttributeAccessIssue]


def encode_alike(tokenizer: Tokenizer, other: Tokenizer) -> bool:
    """Return whether two tokenizers give a text with many kinds of characters the same tokens."""
    return tokenizer.encode(_PROBE) == other.encode(_PROBE)


def lock(tokenizer: Tokenizer) -> None:
    """Lock all tokenizers. For code written for release 0.1, which locked each tokenizer separately."""
    lock_tokenizers()


def _subclasses(kind: type) -> set[type]:
    return {kind}.union(*(_subclasses(subclass) for subclass in kind.__subclasses__()))


def _lock_subclass(kind: type, **options: object) -> None:
    super(PreTrainedTokenizerBase, kind).__init_subclass__(**options)  # pyright: ignore[reportArgumentType]
    _lock_class(kind)


def _lock_class(kind: type) -> None:
    for name, member in list(vars(kind).items()):
        if isfunction(member) and name != "__init__":
            setattr(kind, name, _locked(member))
        elif isinstance(member, property) and member.fget:
            setattr(kind, name, member.getter(_locked(member.fget)))


def _locked(method: Callable[P, R]) -> Callable[P, R]:
    @wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with _MUTEX:
            return method(*args, **kwargs)

    return call


class TokenizedEvaluator(SamplingClientEvaluator):
    """Evaluator that needs a tokenizer and a sampling client.

    Runs call `measure` with the tokenizer of the training client, because the SDK cannot load one by the names of the
    local engine's models. Other callers use the evaluator as a function, with the sampling client's tokenizer.
    """

    async def measure(self, sampler: tinker.SamplingClient, tokenizer: Tokenizer) -> dict[str, float]:
        """Return the metrics of the sampler's weights."""
        raise NotImplementedError

    async def __call__(self, sampling_client: tinker.SamplingClient) -> dict[str, float]:
        return await self.measure(sampling_client, sampling_client.get_tokenizer())
