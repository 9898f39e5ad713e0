"""Batches of a teacher's data: targets of its samples."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import tinker
from tinker import types

from blocks import RunStorage
from engine.tiny import byte_tokenizer
from objectives.batch import Batch
from tasks.common.task import inline_tasks
from tasks.distillation.mixture import Mixture
from tasks.distillation.prompts import PromptGroup, Prompts
from tasks.distillation.teacher_data import SequenceSettings, TeacherDataSource
from tasks.rl.advantages import AdvantageSettings
from tasks.rl.rollout_source import RolloutSettings
from tasks.rl.rollouts.custom_completer import CompleterSpec
from tasks.rl.rollouts.group_rollout import RetryWholeGroup
from tasks.rl.rollouts.sampling_distribution import SamplingDistribution
from tasks.training.teacher import Teacher

PROMPT = types.ModelInput.from_ints([5, 6])


class Sampler:
    """Sampling client that samples the token 97; its likeliest tokens are 1 and 2."""

    async def sample(
        self, prompt: types.ModelInput, num_samples: int, params: types.SamplingParams, **_: Any
    ) -> SimpleNamespace:
        return SimpleNamespace(
            sequences=[SimpleNamespace(tokens=[97], logprobs=[-4.0], stop_reason="stop")] * num_samples,
            prompt_cache_hit_tokens=0,
            topk_prompt_logprobs=[None, *[[(1, math.log(0.6)), (2, math.log(0.2))]] * (prompt.length - 1)],
            prompt_logprobs=[None, *[-4.0] * (prompt.length - 1)],
        )

    async def compute_logprobs(self, prompt: types.ModelInput) -> list[float | None]:
        return [None, *[-4.0] * (prompt.length - 1)]


def load_batch(folder: Path, dataset: Any, top_k: int = 2, completer: CompleterSpec | None = None) -> Batch:
    """Load the first step of a dataset."""
    sampling = SamplingDistribution()
    rollouts = RolloutSettings(0, 4, sampling, RetryWholeGroup(max_retries=0), AdvantageSettings(), completer)
    teacher = Teacher(cast(tinker.SamplingClient, Sampler()), "teacher")
    settings = SequenceSettings("key", rollouts, top_k)
    directory = RunStorage(url=str(folder)).run_directory("run")
    mixture = Mixture[Any]([dataset], [1.0], 2, seed=0)
    source = TeacherDataSource(mixture, [teacher], byte_tokenizer(), settings, directory)
    with inline_tasks():
        (pending,) = source.load(0, cast(tinker.TrainingClient, None))
        return pending.result()


@pytest.mark.parametrize(
    ("completer", "targets", "weights"),
    [
        (None, [1, 97], [0.6, 1.0]),
        (CompleterSpec.load("rollout_parts:OneOf", {"tokens": [97]}), [1, 2], [0.75, 0.25]),
    ],
    ids=["full distribution", "completer"],
)
def test_only_samples_of_the_full_distribution_are_targets(
    tmp_path: Path, completer: CompleterSpec | None, targets: list[int], weights: list[float]
) -> None:
    prompts = Prompts([PromptGroup(PROMPT, PROMPT, [], num_completions=1)] * 2, batch_size=2)
    batch = load_batch(tmp_path, prompts, completer=completer)
    assert batch.target_tokens_DT[batch.mask_DT].tolist() == [targets] * 2
    assert batch.weights_DT[batch.mask_DT].tolist() == [pytest.approx(weights)] * 2
