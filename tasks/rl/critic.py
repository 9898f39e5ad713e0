"""Critic of turns: a ridge regression, outside of the service, that improves the baseline of a group."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import numpy as np
import tinker
import torch
from numpy.typing import NDArray
from tinker_cookbook.rl.types import Transition
from torch import Tensor

from blocks.errors import ConfigError
from tasks.common.builders import import_function, one_line

FIELD = "advantage.critic.features"

# Prompt of a turn and the turns before it.
TurnStart = tuple[tinker.ModelInput, Sequence[Transition]]
Features = Callable[[tinker.ModelInput, Sequence[Transition]], Sequence[float]]


def turn_features(prompt: tinker.ModelInput, history: Sequence[Transition]) -> list[float]:
    """Describe the start of a turn by its number, the rewards so far and the length of its prompt.

    Args:
        prompt: prompt of the turn.
        history: the turns before it.
    """
    return [1 / (1 + len(history)), sum(turn.reward for turn in history), math.log10(1 + prompt.length)]


class Fit(NamedTuple):
    """Sufficient statistics of a regression.

    Attributes:
        gram_FF: weighted sum of the products of inputs.
        moment_F: weighted sum of the products of inputs and targets.
    """

    gram_FF: NDArray[np.float64]
    moment_F: NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Critic:
    """Ridge regression that predicts the return from a turn on. Immutable: `learn` returns another critic.

    The inputs of a turn are 1, the baseline of its group, and the features of its prompt and history. The target is the
    return minus the baseline, so that the penalty shrinks the prediction towards the baseline. The regression weighs
    the turns of a step ``1 - 1 / steps`` times as much as those of the next step.

    Attributes:
        path: import path of `features`.
        features: function of the prompt of a turn and the turns before it.
        ridge: penalty of the squared weights.
        steps: time constant of the memory, see above.
        fit: statistics of the turns so far; None before the first step.
    """

    path: str
    features: Features
    ridge: float = 1.0
    steps: int = 4
    fit: Fit | None = None

    @classmethod
    def load(cls, features: str, ridge: float, steps: int) -> Critic:
        """Import the features of a critic.

        Raises:
            ConfigError: the path cannot be imported, or does not lead to a function.
        """
        function = import_function(features, FIELD)
        if not callable(function):
            raise ConfigError(
                f"{FIELD} is {features!r}, which is of type {type(function).__name__}: name a function of the prompt "
                "of a turn and the turns before it."
            )
        return cls(features, cast(Features, function), ridge, steps)

    @property
    def num_turns(self) -> float:
        """Weighted number of the turns on which the critic is fitted."""
        return float(self.fit.gram_FF[0, 0]) if self.fit else 0.0

    def values(self, starts: Sequence[TurnStart], baselines_N: Tensor) -> Tensor:
        """Predict the return from each turn on, ``(N,)``; the baseline itself before the first step.

        Args:
            starts: prompt and history of each turn.
            baselines_N: baseline of each turn, which does not depend on the turn's own rollout.

        Raises:
            ConfigError: the features are invalid.
        """
        if self.fit is None:
            return baselines_N
        penalty_FF = self.ridge * np.eye(len(self.fit.moment_F))
        weights_F = np.linalg.solve(self.fit.gram_FF + penalty_FF, self.fit.moment_F)
        return baselines_N + torch.from_numpy(self._inputs(starts, baselines_N) @ weights_F)

    def learn(self, starts: Sequence[TurnStart], baselines_N: Tensor, returns_N: Tensor) -> Critic:
        """Return the critic that is also fitted on the turns of a further step.

        Args:
            starts, baselines_N: see `values`.
            returns_N: return from each turn on.

        Raises:
            ConfigError: the features are invalid.
        """
        if not starts:
            return self
        inputs_NF = self._inputs(starts, baselines_N)
        fit = Fit(inputs_NF.T @ inputs_NF, inputs_NF.T @ (returns_N - baselines_N).double().numpy())
        if self.fit:
            memory = 1 - 1 / self.steps
            fit = Fit(memory * self.fit.gram_FF + fit.gram_FF, memory * self.fit.moment_F + fit.moment_F)
        return replace(self, fit=fit)

    def state(self) -> dict[str, Any]:
        """Return the fit as JSON data."""
        if self.fit is None:
            return {}
        return {"features": self.path, "gram": self.fit.gram_FF.tolist(), "moment": self.fit.moment_F.tolist()}

    def restored(self, state: Mapping[str, Any]) -> Critic:
        """Return the critic with the fit of a `state`; unchanged if the state has no fit or one of other features."""
        if state.get("features") != self.path:
            return self
        return replace(self, fit=Fit(np.array(state["gram"]), np.array(state["moment"])))

    def _inputs(self, starts: Sequence[TurnStart], baselines_N: Tensor) -> NDArray[np.float64]:
        rows = [self._features_of(*start) for start in starts]
        num = len(self.fit.moment_F) - 2 if self.fit else len(rows[0])
        for row in rows:
            if len(row) != num:
                raise ConfigError(
                    f"The function {self.path!r} of {FIELD} returned {len(row)} numbers for one turn and {num} for "
                    "another: return the same number of features for each turn."
                )
        ones_N = np.ones(len(rows))
        return np.column_stack([ones_N, baselines_N.double().numpy(), np.array(rows).reshape(len(rows), num)])

    def _features_of(self, prompt: tinker.ModelInput, history: Sequence[Transition]) -> list[float]:
        try:
            row = [float(value) for value in self.features(prompt, history)]
        except Exception as error:  # the user's code
            raise ConfigError(
                f"The function {self.path!r} of {FIELD} failed or returned no list of numbers ({type(error).__name__}: "
                f"{one_line(error)}): correct it."
            ) from error
        for value in row:
            if not math.isfinite(value):
                raise ConfigError(
                    f"The function {self.path!r} of {FIELD} returned the feature {value}: return finite numbers."
                )
        return row
