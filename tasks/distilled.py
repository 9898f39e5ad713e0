"""On-policy distillation: what the student samples, with how much likelier its teacher finds each token."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace

import tinker
import torch
from tinker_cookbook.eval.evaluators import SamplingClientEvaluator
from tinker_cookbook.rl.rollouts import do_group_rollout
from tinker_cookbook.rl.types import EnvGroupBuilder, RLDataset
from tinker_cookbook.tokenizer_utils import Tokenizer
from torch import Tensor

from objectives.batch import Batch
from tasks.mixture import Mixture
from tasks.options import call, whole
from tasks.questions import QuestionGroup
from tasks.rollout import Group
from tasks.rollouts import Cut, Play, RolloutSource
from tasks.source import Trained
from tasks.teacher import Asked, Teacher, behind, score, score_all
from tasks.trajectories import pack_groups


class DistilledSource(RolloutSource):
    """The groups of several datasets, each with its teacher.

    The advantage of a token is its logprob by the teacher minus that by the student that sampled it, so that the
    expected gradient is that of minus the reverse KL, token by token (Agarwal et al. 2023, arXiv:2306.13649).
    """

    def __init__(
        self, mixture: Mixture[EnvGroupBuilder], teachers: Sequence[Teacher], tokenizer: Tokenizer, play: Play
    ) -> None:
        super().__init__(_Mixed(mixture), None, tokenizer, play, Cut())
        self._mixture, self._teachers = mixture, teachers

    def gather(self, step: int, groups: Sequence[Group]) -> Batch:
        batch = super().gather(step, groups)
        played = zip(self._mixture.at(step), groups, strict=True)
        items = [item for item, group in played if group.trajectories is not None]
        items_D = [items[index] for index in batch.labels_D["group"].tolist()]
        asked_D = [
            Asked(self._teachers[item.dataset], as_teacher_sees(item.value, datum))
            for item, datum in zip(items_D, batch.datums, strict=True)
        ]
        labels_D = {**batch.labels_D, "dataset": torch.tensor([item.dataset for item in items_D])}
        advantages_DT = _distance(batch, call(score, whole(asked_D)))
        return replace(batch, advantages_DT=advantages_DT, labels_D=labels_D)

    def metrics(self, step: int, trained: Sequence[Trained], terms: Mapping[str, float]) -> dict[str, float]:
        """Beside those of rollouts, the reverse KL by the sampled tokens, under tinker-cookbook's names."""
        (batch,) = (each.batch for each in trained)
        assert batch.advantages_DT is not None
        kl_M = -batch.advantages_DT[batch.mask_DT]
        dataset_M = batch.labels_D["dataset"][batch.datum_of_DT][batch.mask_DT]
        each = {f"teacher_kl/dataset_{k}": kl_M[dataset_M == k].mean().item() for k in dataset_M.unique().tolist()}
        return super().metrics(step, trained, terms) | {"teacher_kl": kl_M.mean().item()} | each


class TeacherDistance(SamplingClientEvaluator):
    """`test/teacher_kl`: the reverse KL to the teachers on held-out groups, in nats per sampled token.

    By one sample of the student for each member of a group, with the same seeds whenever it is asked.
    """

    def __init__(self, tests: Sequence[tuple[Teacher, RLDataset]], tokenizer: Tokenizer, play: Play) -> None:
        self._asked = [
            (teacher, builder)
            for teacher, dataset in tests
            for index in range(len(dataset))
            for builder in dataset.get_batch(index)
        ]
        self._tokenizer, self._play = tokenizer, play

    async def __call__(self, sampling_client: tinker.SamplingClient) -> dict[str, float]:
        groups = await asyncio.gather(
            *(
                do_group_rollout(builder, self._play.policy(sampling_client, index), self._play.strategy)
                for index, (_, builder) in enumerate(self._asked)
            )
        )
        batch = pack_groups([Group((), each, ()) for each in groups], self._play.shape, self._tokenizer)
        asked = [self._asked[index] for index in batch.labels_D["group"].tolist()]
        asked_D = [
            Asked(teacher, as_teacher_sees(builder, datum))
            for (teacher, builder), datum in zip(asked, batch.datums, strict=True)
        ]
        return {"test/teacher_kl": -_distance(batch, await score_all(asked_D))[batch.mask_DT].mean().item()}


class _Mixed(RLDataset):
    def __init__(self, mixture: Mixture[EnvGroupBuilder]) -> None:
        self._mixture = mixture

    def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
        return [item.value for item in self._mixture.at(index)]

    def __len__(self) -> int:
        return len(self._mixture)


def as_teacher_sees(source: object, datum: tinker.Datum) -> tinker.Datum:
    """A datum of a group, behind what the group shows to the teacher."""
    return behind(source.shown, datum) if isinstance(source, QuestionGroup) else datum


def _distance(batch: Batch, teacher_D: Sequence[Tensor]) -> Tensor:
    """``(N,)``: the teacher's logprob minus the student's of each sampled token, 0 elsewhere."""
    assert batch.sampling_logprobs_DT is not None
    distance_DT = torch.zeros(batch.num_tokens)
    distance_DT[batch.mask_DT] = torch.cat(list(teacher_D)) - batch.sampling_logprobs_DT[batch.mask_DT]
    return distance_DT
