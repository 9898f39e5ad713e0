"""Answers that a reward model scores: the log-probability that it gives to the verdict on a good one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import chz
import tinker
from tinker_cookbook.preference.preference_datasets import ComparisonDatasetBuilder
from tinker_cookbook.renderers import Message, Renderer, get_text_content
from tinker_cookbook.rl.preference_envs import PreferenceEnv
from tinker_cookbook.rl.types import Env, EnvGroupBuilder, Metrics, RLDataset, Trajectory

from tasks.comparisons import Comparisons, Rendering, Verdict
from tasks.environments.groups import Groups, GroupsBuilder
from tasks.teacher import Asked, Teacher, score_all
from tasks.weights import open_sampler


@dataclass(frozen=True, slots=True)
class RewardModel:
    """Weights that were trained on verdicts, by the loss `bradley_terry`.

    Attributes:
        teacher: the weights.
        rendering: of conversations with a verdict behind them.
    """

    teacher: Teacher
    rendering: Rendering

    async def score(self, conversations: Sequence[Sequence[Message]]) -> list[float]:
        """The log-probability of the good verdict on the last answer of each, nats.

        Raises:
            ServiceError: the service failed, or the log-probability is not finite.
        """
        asked = [Asked(self.teacher, self.rendering.datum(each)) for each in conversations]
        return [float(found_M.sum()) for found_M in await score_all(asked)]


@dataclass(frozen=True)
class RewardedGroup(EnvGroupBuilder):
    """Several answers to one prompt.

    Attributes:
        format_coef: what an answer loses that has no end.
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
        parsed = [self.renderer.parse_response(each.transitions[0].ac.tokens) for each in trajectory_group]
        said = [Message(role="assistant", content=get_text_content(message)) for message, _ in parsed]
        scores = await self.reward_model.score([[*self.prompt, each] for each in said])
        ended = [float(termination.is_stop_sequence) for _, termination in parsed]
        return [
            (score + self.format_coef * (end - 1.0), {"score": score, "format": end})
            for score, end in zip(scores, ended, strict=True)
        ]

    def logging_tags(self) -> list[str]:
        return ["reward_model"]


@chz.chz
class RewardedBuilder(GroupsBuilder):
    """The prompts of comparisons, their answers scored by a model that `dpo` trained with a `verdict`.

    Attributes:
        path: its checkpoint, `tinker://...`.
        question, good: of the verdict that it was trained on.
        format_coef: what an answer loses that has no end within the limit of tokens.
        session: the run fills it in.
    """

    comparison_builder: ComparisonDatasetBuilder
    path: str
    question: str
    good: str
    session: tinker.ServiceClient = chz.field(meta_factory=None)
    format_coef: float = 1.0

    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        renderer = self.renderer()
        sampler, _ = open_sampler(self.session, self.path, self.path)
        rendering = Rendering(renderer, None, Verdict(self.question, self.good))
        model = RewardModel(Teacher(sampler, self.path), rendering)

        def groups(rows: Comparisons, size: int) -> list[RewardedGroup]:
            prompts = [rows[index].prompt for index in range(len(rows))]
            return [RewardedGroup(each, renderer, model, size, self.format_coef) for each in prompts]

        train, test = self.comparison_builder.get_train_and_test_datasets()
        training = Groups(groups(Comparisons(self.comparison_builder, train), self.group_size), self.batch_size)
        if test is None:
            return training, None
        held_out = groups(Comparisons(self.comparison_builder, test), 1)
        return training, Groups(held_out, len(held_out))
