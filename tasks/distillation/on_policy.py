"""On-policy distillation: rollouts of the student, with per-token advantages or soft targets from a teacher."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, NamedTuple

import tinker
import torch
from tinker import types
from tinker_cookbook.exceptions import AllTrajectoriesFailedError
from tinker_cookbook.rl.rollouts import do_group_rollout
from tinker_cookbook.rl.types import EnvGroupBuilder, RLDataset, TrajectoryGroup
from tinker_cookbook.tokenizer_utils import Tokenizer
from torch import Tensor

from objectives.batch import Batch, unpack
from objectives.labels import MEMBER
from objectives.reductions import mean_by_datum, sum_by_datum
from tasks.common.sampling import wait_for_snapshot
from tasks.common.service_errors import wait_for_response
from tasks.common.task import Pending, call, opaque_argument
from tasks.distillation.hindsight import Hindsight
from tasks.distillation.mixture import Mixture
from tasks.distillation.prompts import PromptGroup
from tasks.distillation.soft_targets import OnPolicyTopK, with_top_k
from tasks.evaluation.grading_metrics import digest_problems
from tasks.evaluation.policy_metrics import ratio_scores
from tasks.rl.rollout_source import (
    HeldOutGroups,
    MinibatchSettings,
    RolloutSettings,
    RolloutSource,
    first_prompt,
    number_groups,
)
from tasks.rl.rollouts.group_rollout import Group
from tasks.rl.trajectories import GROUP_INDEX, add_later_tokens, compute_entropy, pack_groups
from tasks.training.batch_source import SampledTokens, TrainedBatch
from tasks.training.examples import take_datums
from tasks.training.held_out import EvaluatedBatch, GradedMetrics
from tasks.training.reference import scored_tokens
from tasks.training.teacher import Teacher, TeacherRequest, compute_top_k, replace_prompt, score, score_all

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TeacherTargets:
    """Targets that the teacher gives to the student's samples.

    Attributes:
        kl_penalty_coef: weight of the reverse KL in the advantages.
        kl_discount_factor: discount per token of the KL of later tokens; 0 to leave them out.
        train_on_rewards: add the advantages of the environments' rewards.
        top_k: number of soft targets per position, trained by cross-entropy instead of advantages; 0 for advantages.
        skip_first_n_tokens: number of sampled tokens at the start of each completion that get no soft targets.
    """

    kl_penalty_coef: float = 1.0
    kl_discount_factor: float = 0.0
    train_on_rewards: bool = False
    top_k: int = 0
    skip_first_n_tokens: int = 3


@dataclass(frozen=True, slots=True)
class TeacherSync:
    """Periodic replacement of the teacher by the student's weights.

    Attributes:
        every: steps between replacements.
        open: opens saved weights as a teacher.
    """

    every: int
    open: Callable[[str], Teacher]


class TaughtBatch(NamedTuple):
    """Student's samples with the datums that the teacher scores.

    Attributes:
        batch: student's samples to train on.
        datums_D: teacher's datum for each sample; None for a sample that the teacher does not score.
    """

    batch: Batch
    datums_D: Sequence[tinker.Datum | None]


class SyncedWeights(NamedTuple):
    """Weights of the teacher: the student's weights before `step`, saved at `path` on the service."""

    step: int
    path: str


class OnPolicySource(RolloutSource):
    """Source of rollouts on several datasets, each with its teacher.

    The advantage of a token is the teacher's logprob minus the logprob of the student that sampled the token. The
    expected gradient is that of the negative reverse KL, token by token (Agarwal et al. 2023, arXiv:2306.13649). With
    `top_k`, the targets are the teacher's most likely tokens at each position of the student's samples (Shenfeld et al.
    2026, arXiv:2601.19897).

    Attributes:
        hindsight: settings of the context that the teacher gets from the outcomes of each group, as in SDPO; None if
            the teacher gets no context. Set after construction.
    """

    hindsight: Hindsight | None = None

    def __init__(
        self,
        mixture: Mixture[EnvGroupBuilder],
        teachers: Sequence[Teacher],
        tokenizer: Tokenizer,
        settings: RolloutSettings,
        targets: TeacherTargets = TeacherTargets(),
        sync: TeacherSync | None = None,
    ) -> None:
        """Create the source.

        Args:
            sync: when and how the student's weights replace the teacher, only for a mixture of one dataset; None to
                keep the first teacher.
        """
        super().__init__(_MixtureDataset(mixture), None, tokenizer, settings, MinibatchSettings())
        self._mixture, self._teachers, self._targets, self._sync = mixture, teachers, targets, sync
        self._hindsight_metrics: dict[int, dict[str, float]] = {}
        self._synced: SyncedWeights | None = None  # None for the first teacher
        self._last_due = 0  # last step at which the teacher was to be replaced
        # Step and requested save of the weights that become the teacher.
        self._saving: tuple[int, tinker.APIFuture[types.SaveWeightsForSamplerResponse]] | None = None
        # Values by step, of the steps whose metrics are not computed yet.
        self._gaps: dict[int, Tensor] = {}  # teacher's logprobs minus the student's
        self._scored: dict[int, SampledTokens] = {}  # tokens that the policy scores as its own teacher
        self._ages: dict[int, int] = {}  # steps since the teacher's weights were current
        self._soft: dict[int, tuple[Batch, OnPolicyTopK]] = {}  # batch of the samples, and its soft targets
        self._untaught: set[int] = set()  # steps without a context, which teach nothing

    def begin(self, step: int, num_steps: int, state: Mapping[str, Any]) -> None:
        super().begin(step, num_steps, state)
        if self._sync is None:
            return
        self._last_due = max(0, step - 1) // self._sync.every * self._sync.every
        if synced := state.get("teacher_sync"):
            self._synced = SyncedWeights(*synced)
            self._last_due = self._synced.step
            self._teachers = [self._open(self._synced.path)]

    def state(self, step: int) -> dict[str, Any]:
        return super().state(step) | ({"teacher_sync": list(self._synced)} if self._synced else {})

    def load(self, step: int, client: tinker.TrainingClient) -> Sequence[Pending[Batch]]:
        if self._sync:
            due = step // self._sync.every * self._sync.every
            if due > self._last_due and not self._teacher_is_policy(step):
                self._last_due = due
                self._saving = (due, client.save_weights_for_sampler(f"teacher_sync_{due}"))
        return super().load(step, client)

    def _open(self, path: str) -> Teacher:
        """Open saved weights as a teacher on the same service as the first one."""
        assert self._sync is not None
        return replace(self._sync.open(path), can_score_last_n=self._teachers[0].can_score_last_n)

    def _teacher_is_policy(self, step: int) -> bool:
        """Return whether the teacher of a step is the policy that samples the step.

        Its weights need no copy, because the step has a snapshot of them. Without hindsight, step 0 has the first
        teacher, because no replacement is due before step `every`.
        """
        return self._sync is not None and self._sync.every == 1 and (step > 0 or self.hindsight is not None)

    def _replace_teacher(self, step: int) -> None:
        """Wait for the weights that are due to become the teacher, and open them."""
        if self._teacher_is_policy(step):
            assert self._snapshot is not None
            version, snapshot = self._snapshot
            assert version == step, "a step is gathered before the next one is loaded"
            teacher = replace(self._teachers[0], sampler=wait_for_snapshot(snapshot), name="the policy")
            self._teachers, self._synced = [teacher], None
            return
        if self._sync is None or self._saving is None:
            return
        due, save = self._saving
        path = wait_for_response(save, "save the weights of the student as its teacher").path
        self._synced, self._saving = SyncedWeights(due, path), None
        self._teachers = [self._open(path)]

    def gather(self, step: int, groups: Sequence[Group]) -> Batch:
        self._replace_teacher(step)
        if self._sync:
            age = 0 if self._teacher_is_policy(step) else step - (self._synced.step if self._synced else 0)
            self._ages[step] = age
        batch = super().gather(step, groups)
        rollouts = zip(self._mixture.at(step), groups, strict=True)
        items = [item for item, group in rollouts if group.trajectories is not None]
        # Distillation drops no constant groups, so the label `group` counts the groups that succeeded.
        dataset_D = torch.tensor([items[index].dataset for index in batch.labels_D["group"].tolist()])
        batch = replace(batch, labels_D={**batch.labels_D, "dataset": dataset_D})
        if self.hindsight:
            taught = self._with_hindsight(step, self.hindsight, batch, groups)
        else:
            builders_D = [items[index].value for index in batch.labels_D["group"].tolist()]
            pairs = zip(builders_D, batch.datums, strict=True)
            taught = TaughtBatch(batch, [datum_for_teacher(builder, datum) for builder, datum in pairs])
        if self._targets.top_k:
            return self._gather_top_k(step, taught)
        batch = taught.batch
        self._gaps[step] = _logprob_gap(batch, self._score_taught(step, taught))
        return replace(batch, advantages_DT=add_teacher_advantages(batch, self._gaps[step], self._targets))

    def _with_hindsight(self, step: int, hindsight: Hindsight, batch: Batch, groups: Sequence[Group]) -> TaughtBatch:
        """Return the samples whose teacher has a context; all samples if the run also trains on rewards.

        If the run does not train on rewards and no sample has a context, the result is one sample that the teacher does
        not score.
        """
        contexts = {number: hindsight.contexts(group) for number, group in enumerate(groups) if group.trajectories}
        places_D = zip(batch.labels_D[GROUP_INDEX].tolist(), batch.labels_D[MEMBER].tolist(), strict=True)
        contexts_D = [contexts[number][member] for number, member in places_D]
        all_contexts = [context for contexts_G in contexts.values() for context in contexts_G]
        self._hindsight_metrics[step] = {"hindsight/taught": fmean(map(bool, all_contexts))}
        if step == self._first_step and not any(all_contexts):
            rest = "trains on the rewards alone" if self._targets.train_on_rewards else "teaches nothing"
            self._warnings["hindsight"] = (
                f"No rollout of step {step} has a context for its teacher, so the step {rest}: make the problems "
                "easier, lower hindsight.success_reward, sample larger groups, or give feedback in "
                "text_labels of the environment."
            )
        rows = range(batch.num_datums)
        if not self._targets.train_on_rewards:
            rows = [row for row, context in enumerate(contexts_D) if context]
            if not rows:
                self._untaught.add(step)
                rows = [int(sum_by_datum(batch.mask_DT.float(), batch).argmax())]
        taught = take_datums(batch, rows)
        return TaughtBatch(
            taught,
            [
                hindsight.datum(datum, contexts_D[row], self.tokenizer) if contexts_D[row] else None
                for row, datum in zip(rows, taught.datums, strict=True)
            ],
        )

    def _score_taught(self, step: int, taught: TaughtBatch) -> list[Tensor]:
        """Teacher's logprobs of the samples; the student's logprobs of samples that the teacher does not score."""
        batch = taught.batch
        assert batch.snapshot_logprobs_DT is not None
        requests = self._requests(batch, taught.datums_D)
        self._note_scored(step, requests)
        scores = iter(call(score, opaque_argument([request for request in requests if request])))
        students_D = zip(
            unpack(batch.snapshot_logprobs_DT, batch.offsets_D), unpack(batch.mask_DT, batch.offsets_D), strict=True
        )
        return [
            next(scores) if request else logprobs_T[mask_T]
            for request, (logprobs_T, mask_T) in zip(requests, students_D, strict=True)
        ]

    def _note_scored(self, step: int, requests: Sequence[TeacherRequest | None]) -> None:
        """Note the tokens that the policy scores as its own teacher; no meter counts the requests of its snapshot."""
        if self._teacher_is_policy(step):
            lengths = [request.datum.model_input.length for request in requests if request]
            self._scored[step] = scored_tokens(sum(lengths), len(lengths))

    def _requests(self, batch: Batch, datums_D: Sequence[tinker.Datum | None]) -> list[TeacherRequest | None]:
        teachers_D = [self._teachers[dataset] for dataset in batch.labels_D["dataset"].tolist()]
        pairs = zip(teachers_D, datums_D, strict=True)
        return [TeacherRequest(teacher, datum) if datum else None for teacher, datum in pairs]

    def _gather_top_k(self, step: int, taught: TaughtBatch) -> Batch:
        batch = taught.batch
        # Every datum needs soft targets: without a datum for the teacher, the teacher sees what the student saw.
        pairs = zip(taught.datums_D, batch.datums, strict=True)
        datums_D = [teacher_datum or student_datum for teacher_datum, student_datum in pairs]
        requests = [request for request in self._requests(batch, datums_D) if request]
        self._note_scored(step, requests)
        tops_D = call(compute_top_k, opaque_argument(requests), self._targets.top_k)
        teacher_D = [top.target_logprobs_M for top in tops_D if top.target_logprobs_M is not None]
        # A service may return no logprobs of the sampled tokens; the step then has no teacher_kl.
        if len(teacher_D) == len(tops_D):
            self._gaps[step] = _logprob_gap(batch, teacher_D)
        soft = with_top_k(batch, tops_D, self._targets.skip_first_n_tokens)
        self._soft[step] = (batch, soft)
        return replace(soft.batch, trains_base=self.teaches(step))

    def teaches(self, step: int) -> bool:
        return step not in self._untaught

    def metrics(self, step: int, trained: Sequence[TrainedBatch], terms: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics of rollouts and the reverse KL on the sampled tokens, under tinker-cookbook's names."""
        (minibatch,) = trained
        forward: dict[str, float] = {}
        if self._targets.top_k:
            sampled, soft = self._soft.pop(step)
            forward = {"teacher_kl/forward": soft.forward_kl(minibatch.logprobs_DT)}
            trained = [replace(minibatch, batch=sampled)]
        batch = trained[0].batch
        age = {"teacher_age": float(self._ages.pop(step))} if self._sync else {}
        self._sampled += self._scored.pop(step, SampledTokens())
        hindsight = self._hindsight_metrics.pop(step, {})
        if hindsight:
            hindsight["hindsight/skipped_update"] = float(not self.teaches(step))
        self._untaught.discard(step)
        metrics = super().metrics(step, trained, terms) | forward | age | hindsight
        if (gap_DT := self._gaps.pop(step, None)) is None:
            return metrics
        kl_M = -gap_DT[batch.mask_DT]
        dataset_M = batch.labels_D["dataset"][batch.datum_of_DT][batch.mask_DT]
        by_dataset = {
            f"teacher_kl/dataset_{k}": kl_M[dataset_M == k].mean().item() for k in dataset_M.unique().tolist()
        }
        return metrics | {"teacher_kl": kl_M.mean().item()} | by_dataset

    def policy_metrics(self, trained: Sequence[TrainedBatch], terms: Mapping[str, float]) -> dict[str, float]:
        # With soft targets, the service returns no logprobs of the sampled tokens, and nothing trains on advantages.
        if not self._targets.top_k:
            return super().policy_metrics(trained, terms)
        return {"optim/entropy": compute_entropy(trained)}


class TeacherKL(HeldOutGroups):
    """Reverse KL `test/teacher_kl` to the teachers on held-out groups, in nats per sampled token.

    Estimated from one sample of the student per group member, with the same seeds at every evaluation. Each group has a
    score for paired comparisons; the mean of the scores is the metric. Failed groups are left out; if all groups fail,
    there is no metric.
    """

    scored_metrics = ("test/teacher_kl",)

    def __init__(
        self, tests: Sequence[tuple[Teacher, RLDataset]], tokenizer: Tokenizer, settings: RolloutSettings
    ) -> None:
        self._groups = [
            (teacher, builder)
            for teacher, dataset in tests
            for index in range(len(dataset))
            for builder in dataset.get_batch(index)
        ]
        self._tokenizer, self._settings = tokenizer, settings

    async def __call__(self, sampling_client: tinker.SamplingClient) -> dict[str, float]:
        groups = number_groups([builder for _, builder in self._groups])
        strategy, policy = self.strategy(self._settings.strategy), self._settings.policy(sampling_client)
        outcomes = await asyncio.gather(
            *(do_group_rollout(group, policy, strategy) for group in groups), return_exceptions=True
        )
        rolled_out: list[TrajectoryGroup] = []
        evaluated: list[tuple[Teacher, EnvGroupBuilder]] = []
        for outcome, group in zip(outcomes, self._groups, strict=True):
            if isinstance(outcome, TrajectoryGroup):
                rolled_out.append(outcome)
                evaluated.append(group)
            elif not isinstance(outcome, AllTrajectoriesFailedError):
                raise outcome
        num_failed = len(self._groups) - len(rolled_out)
        if num_failed:
            logger.warning("%d of %d held-out groups failed and have no teacher KL.", num_failed, len(self._groups))
        if not rolled_out:
            self.evaluated = ()
            return {}
        batch = pack_groups([Group((), group, ()) for group in rolled_out], self._settings.shape, self._tokenizer)
        assert batch.snapshot_logprobs_DT is not None
        groups_D = [evaluated[index] for index in batch.labels_D["group"].tolist()]
        requests_D = [
            TeacherRequest(teacher, datum_for_teacher(builder, datum))
            for (teacher, builder), datum in zip(groups_D, batch.datums, strict=True)
        ]
        kl_DT = -_logprob_gap(batch, await score_all(requests_D))
        scores_D = tuple({"teacher_kl": value} for value in mean_by_datum(kl_DT, batch).tolist())
        self.evaluated = [EvaluatedBatch(batch, batch.snapshot_logprobs_DT, scores_D)]
        num_tokens_D = sum_by_datum(batch.mask_DT.float(), batch)
        sums_D = sum_by_datum(kl_DT, batch)
        scores_G = ratio_scores(
            sums_D.tolist(), num_tokens_D.tolist(), batch.labels_D["group"].tolist(), len(rolled_out)
        )
        return GradedMetrics(
            {"test/teacher_kl": kl_DT[batch.mask_DT].mean().item()},
            {"test/teacher_kl": scores_G},
            digest_problems(first_prompt(group) for group in rolled_out),
        )


class _MixtureDataset(RLDataset):
    def __init__(self, mixture: Mixture[EnvGroupBuilder]) -> None:
        self._mixture = mixture

    def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
        return [item.value for item in self._mixture.at(index)]

    def __len__(self) -> int:
        return len(self._mixture)


def add_teacher_advantages(batch: Batch, gap_DT: Tensor, targets: TeacherTargets) -> Tensor:
    """Advantages from the teacher, ``(N,)``; with `train_on_rewards`, plus the advantages from the rewards.

    The advantages from the teacher equal those of tinker-cookbook's on-policy distillation at the sampled tokens, and
    are 0 elsewhere.

    Args:
        gap_DT: teacher's logprob minus the student's of each sampled token; 0 at other tokens.
    """
    advantages_DT = add_later_tokens(batch, targets.kl_penalty_coef * gap_DT, targets.kl_discount_factor)
    if not targets.train_on_rewards:
        return advantages_DT
    assert batch.advantages_DT is not None
    return batch.advantages_DT + advantages_DT


def datum_for_teacher(builder: object, datum: tinker.Datum) -> tinker.Datum:
    """Datum with the teacher's prompt if the builder of its group is a `PromptGroup`; otherwise, the datum itself."""
    return replace_prompt(builder.teacher_prompt, datum) if isinstance(builder, PromptGroup) else datum


def _logprob_gap(batch: Batch, teacher_D: Sequence[Tensor]) -> Tensor:
    """Teacher's logprob minus the student's of each sampled token, ``(N,)``; 0 at other tokens."""
    assert batch.snapshot_logprobs_DT is not None
    gap_DT = torch.zeros(batch.num_tokens)
    gap_DT[batch.mask_DT] = torch.cat(list(teacher_D)) - batch.snapshot_logprobs_DT[batch.mask_DT]
    return gap_DT
