"""Rewards from a generative reward model: the logprob of its verdict that an answer is good."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import chz
import tinker
from tinker_cookbook.preference.preference_datasets import ComparisonDatasetBuilder
from tinker_cookbook.renderers import Message, Renderer, get_text_content
from tinker_cookbook.rl.preference_envs import PreferenceEnv
from tinker_cookbook.rl.types import Env, EnvGroupBuilder, Metrics, RLDataset, Trajectory

from tasks.preference.dataset import Comparisons, Rendering, Verdict, held_out_comparisons
from tasks.rl.environments.groups import Groups, GroupsBuilder
from tasks.training.teacher import Teacher, TeacherRequest, score_all
from tasks.training.token_meter import TokenMeter, open_counted_sampler


@dataclass(frozen=True, slots=True)
class RewardModel:
    """Reward model trained on verdicts with the loss `bradley_terry`.

    Attributes:
        teacher: frozen weights.
        rendering: conversion of conversations to datums with a verdict.
    """

    teacher: Teacher
    rendering: Rendering

    async def score(self, conversations: Sequence[Sequence[Message]]) -> list[float]:
        """Return the logprob of the good verdict on the last answer of each conversation, in nats.

        Raises:
            ServiceError: the service failed, or a logprob is not finite.
        """
        requests = [TeacherRequest(self.teacher, self.rendering.datum(messages)) for messages in conversations]
        return [float(logprobs_M.sum()) for logprobs_M in await score_all(requests)]


@dataclass(frozen=True)
class RewardModelGroupBuilder(EnvGroupBuilder):
    """Builder of a group of answers to one prompt.

    Attributes:
        format_coef: penalty for truncated answers.
    """

    prompt: Sequence[Message]
    renderer: Renderer
    reward_model: RewardModel
    size: int
    format_coef: float

    async def make_envs(self) -> Sequence[Env]:
        return [PreferenceEnv(list(self.prompt), self.renderer) for _ in range(self.size)]

    async def compute_group_rewards(
        self, trajectory_group: list[Trajectory], env_group: Sequence[Env]
    ) -> list[tuple[float, Metrics]]:
        parsed = [self.renderer.parse_response(trajectory.transitions[0].ac.tokens) for trajectory in trajectory_group]
        answers = [Message(role="assistant", content=get_text_content(message)) for message, _ in parsed]
        scores = await self.reward_model.score([[*self.prompt, answer] for answer in answers])
        complete = [float(termination.is_stop_sequence) for _, termination in parsed]
        return [
            (score + self.format_coef * (is_complete - 1.0), {"score": score, "format": is_complete})
            for score, is_complete in zip(scores, complete, strict=True)
        ]

    def num_scored_tokens(self) -> int:
        """Return the number of tokens that the reward model reads for an empty answer."""
        answer = Message(role="assistant", content="")
        return self.reward_model.rendering.datum([*self.prompt, answer]).model_input.length + 1

    def logging_tags(self) -> list[str]:
        return ["reward_model"]


@chz.chz
class RewardModelBuilder(GroupsBuilder):
    """Builder of prompts from comparisons; a model that `dpo` trained with a `verdict` scores the answers.

    Attributes:
        comparison_builder: builder of the comparisons.
        path: checkpoint of the reward model, `tinker://...`; empty for the base model.
        question: question of the verdict that the reward model was trained on.
        good: answer of the verdict that the reward model was trained on.
        session, token_meter, base_model: filled in by the run.
        format_coef: penalty for truncated answers.
    """

    comparison_builder: ComparisonDatasetBuilder
    path: str
    question: str
    good: str
    session: tinker.ServiceClient = chz.field(meta_factory=None)
    token_meter: TokenMeter | None = chz.field(meta_factory=None, default=None)
    base_model: str = ""
    format_coef: float = 1.0

    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        renderer = self.renderer()
        model = self.path or self.base_model
        sampler, _ = await asyncio.to_thread(open_counted_sampler, self.session, self.path, model, self.token_meter)
        rendering = Rendering(renderer, None, Verdict(self.question, self.good))
        reward_model = RewardModel(Teacher(sampler, model), rendering)

        def groups(rows: Comparisons, size: int) -> list[RewardModelGroupBuilder]:
            prompts = [rows[index].prompt for index in range(len(rows))]
            return [
                RewardModelGroupBuilder(prompt, renderer, reward_model, size, self.format_coef) for prompt in prompts
            ]

        train, test = self.comparison_builder.get_train_and_test_datasets()
        training = Groups(groups(Comparisons(self.comparison_builder, train), self.group_size), self.batch_size)
        comparisons = held_out_comparisons(self.comparison_builder, test)
        if comparisons is None:
            return training, None
        held_out = groups(comparisons, 1)
        return training, Groups(held_out, len(held_out))
