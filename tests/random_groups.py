"""Random groups of trajectories as batches of this project and as data of tinker-cookbook, and random scores."""

from __future__ import annotations

from typing import Any, cast

import tinker
import torch
from tinker import types
from tinker_cookbook.completers import TokensWithLogprobs
from tinker_cookbook.rl.data_processing import assemble_training_data, compute_advantages
from tinker_cookbook.rl.types import Trajectory, TrajectoryGroup, Transition
from torch import Tensor

from objectives.batch import Batch
from tasks.rl.advantages import AdvantageSettings
from tasks.rl.rollouts.group_rollout import Group
from tasks.rl.trajectories import pack_groups


class Decoder:
    """Tokenizer that only decodes."""

    def decode(self, tokens: list[int]) -> str:
        return " ".join(map(str, tokens))


class RandomScores:
    """Sampling client that gives each sequence random logprobs, a function of its tokens."""

    def logprobs(self, tokens: types.ModelInput) -> list[float | None]:
        generator = torch.Generator().manual_seed(hash(tuple(tokens.to_ints())) % 2**32)
        return [None, *(-3 * torch.rand(tokens.length - 1, generator=generator)).tolist()]

    async def compute_logprobs_async(self, tokens: types.ModelInput) -> list[float | None]:
        return self.logprobs(tokens)

    async def compute_logprobs(self, tokens: types.ModelInput) -> list[float | None]:
        return self.logprobs(tokens)


def random_groups(seed: int = 0, num_turns: int = 2) -> list[TrajectoryGroup]:
    """Three groups of two completions; the prompt of a later turn continues the turn before."""
    generator = torch.Generator().manual_seed(seed)

    def tokens(num: int) -> list[int]:
        return torch.randint(3, 200, (num,), generator=generator).tolist()

    def trajectory() -> Trajectory:
        turns, prompt = [], tokens(3)
        for _ in range(num_turns):
            action = tokens(int(torch.randint(1, 6, (1,), generator=generator)))
            logprobs = (-2 * torch.rand(len(action), generator=generator)).tolist()
            reward = float(torch.rand(1, generator=generator))
            ob = types.ModelInput.from_ints(prompt)
            turns.append(Transition(ob, TokensWithLogprobs(action, logprobs), reward, episode_done=False))
            prompt = [*prompt, *action, *tokens(2)]
        return Trajectory(transitions=turns, final_ob=types.ModelInput.from_ints(prompt))

    return [TrajectoryGroup([trajectory(), trajectory()], [0.0, 1.0], [{}, {}]) for _ in range(3)]


def packed(groups: list[TrajectoryGroup]) -> Batch:
    return pack_groups([Group((), group, ()) for group in groups], AdvantageSettings(), cast(Any, Decoder()))


def cookbook_data(groups: list[TrajectoryGroup]) -> list[tinker.Datum]:
    return assemble_training_data(groups, compute_advantages(groups))[0]


def reference_of(batch: Batch) -> Tensor:
    """Logprobs of `RandomScores` at the targets of a batch."""
    sequences = [
        datum.model_input.append_int(int(datum.loss_fn_inputs["target_tokens"].data[-1])) for datum in batch.datums
    ]
    return torch.cat([torch.tensor(RandomScores().logprobs(tokens)[1:]) for tokens in sequences])


def advantages_of(data: list[tinker.Datum]) -> Tensor:
    """Advantages of the sampled tokens."""
    inputs = [datum.loss_fn_inputs for datum in data]
    return torch.cat([row["advantages"].to_torch()[row["mask"].to_torch() > 0] for row in inputs])
