"""Token completers of users as the policy of rollouts."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import tinker
from tinker_cookbook.completers import StopCondition, TokenCompleter, TokensWithLogprobs

from blocks.errors import ConfigError
from tasks.common.builders import import_builder
from tasks.common.service_errors import service_errors
from tasks.rl.rollouts.group_progress import GroupProgress
from tasks.training.batch_source import SampledTokens

# Logprobs of certain tokens may be slightly positive due to rounding.
_ROUNDING = 1e-4


@dataclass(frozen=True, slots=True)
class CompleterSpec:
    """Import path of a class or function that returns a `TokenCompleter`, and its parameters.

    The class or function is called with its parameters, and with those of the arguments `sampling_client`,
    `max_tokens`, `temperature` and `seed` that it accepts and the parameters do not set. For each token, the completer
    returns the natural logarithm of the probability with which the token was drawn.

    Attributes:
        path: import path.
        make: the class or function with the parameters.
        arguments: names of the arguments that it takes.
    """

    path: str
    make: Callable[..., TokenCompleter]
    arguments: frozenset[str]

    @classmethod
    def load(cls, path: str, params: Mapping[str, Any]) -> CompleterSpec:
        """Import a completer.

        Raises:
            ConfigError: the path cannot be imported or called, or its parameters lack `sampling_client` or one of
                `params`.
        """
        target = import_builder(path, "rollout.completer.builder", TokenCompleter)
        if not callable(target):
            raise ConfigError(
                f"rollout.completer.builder is {path!r}, which is no class or function: name one that takes a "
                "sampling_client and returns a tinker_cookbook.completers.TokenCompleter."
            )
        parameters = inspect.signature(target).parameters.values()
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        names = {parameter.name for parameter in parameters}
        if unknown := [] if takes_all else sorted(set(params) - names):
            raise ConfigError(
                f"rollout.completer.builder {path!r} has no parameter {unknown[0]!r}: remove it from "
                "rollout.completer.params."
            )
        if not takes_all and "sampling_client" not in names:
            raise ConfigError(
                f"rollout.completer.builder {path!r} has no parameter sampling_client, through which it reaches the "
                "policy: add it."
            )
        offered = {"sampling_client", "max_tokens", "temperature", "seed"} - set(params)
        make = cast(Callable[..., TokenCompleter], partial(target, **params))
        return cls(path, make, frozenset(offered if takes_all else offered & names))


class CheckedCompleter(TokenCompleter):
    """Completer of one member of a group in one attempt; it checks the completions."""

    def __init__(self, spec: CompleterSpec, progress: GroupProgress, **offered: Any) -> None:
        """Prepare the user's completer, which is created at the first turn, so that its errors fail only this member.

        Args:
            progress: counts prompt tokens, sampled tokens and completions.
            offered: arguments that the completer may take.
        """
        self._spec, self._progress, self._offered = spec, progress, offered
        self._completer: TokenCompleter | None = None

    async def __call__(
        self, model_input: tinker.ModelInput, stop: StopCondition, *, max_tokens: int | None = None
    ) -> TokensWithLogprobs:
        if self._completer is None:
            self._completer = self._spec.make(**{name: self._offered[name] for name in self._spec.arguments})
        # As in tinker-cookbook, a completer needs no `max_tokens` unless the environment limits the rollout's tokens.
        limit = {} if max_tokens is None else {"max_tokens": max_tokens}
        try:
            completion = await self._completer(model_input, stop, **limit)
        except tinker.TinkerError:
            with service_errors("sample a rollout"):
                raise
        check_completion(self._spec.path, completion)
        self._progress.add(SampledTokens(model_input.length, len(completion.tokens)), 1)
        return completion


def check_completion(path: str, completion: object) -> None:
    """Check that a completion has a token ID and a logprob for each token, and a stop reason.

    Args:
        path: import path of the completer, for the error message.

    Raises:
        ConfigError: the completion cannot be trained on.
    """
    if not isinstance(completion, TokensWithLogprobs):
        raise ConfigError(
            f"The completer {path} returned a {type(completion).__name__}: return a "
            "tinker_cookbook.completers.TokensWithLogprobs."
        )
    tokens, logprobs = completion.tokens, completion.maybe_logprobs
    if odd := [token for token in tokens if not (isinstance(token, int) and token >= 0)]:
        raise ConfigError(
            f"The completer {path} returned the token {odd[0]!r}, which is no token ID: return Python integers of at "
            "least 0."
        )
    if logprobs is None or len(logprobs) != len(tokens):
        num_logprobs = "no" if logprobs is None else len(logprobs)
        raise ConfigError(
            f"The completer {path} returned {num_logprobs} logprobs for {len(tokens)} tokens: return one for each."
        )
    if bad := [value for value in logprobs if value is None or not math.isfinite(value) or value > _ROUNDING]:
        raise ConfigError(
            f"The completer {path} returned the logprob {bad[0]}: return the natural logarithm of the probability with "
            "which each token was drawn, a finite number of at most 0."
        )
    if completion.stop_reason not in ("stop", "length"):
        raise ConfigError(
            f"The completer {path} returned the stop reason {completion.stop_reason!r}: return stop or length."
        )
