"""Tournaments of answers by a preference model: tinker-cookbook's pairwise rewards, with held-out rows."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import chz
from tinker_cookbook import renderers
from tinker_cookbook.preference.types import PreferenceModel
from tinker_cookbook.renderers import Message
from tinker_cookbook.rl.preference_envs import (
    PairwisePreferenceGroupBuilder,
    PairwisePreferenceRLDatasetBuilder,
    TournamentPattern,
)
from tinker_cookbook.rl.types import Env, Metrics, RLDataset, Trajectory
from tinker_cookbook.tokenizer_utils import get_tokenizer

from tasks.preference.dataset import Comparisons, held_out_comparisons
from tasks.rl.environments.groups import Groups


class ChosenAnswerGroupBuilder(PairwisePreferenceGroupBuilder):
    """Group of answers to a held-out prompt that compete with the row's chosen answer, as in `ComparisonEvaluator`."""

    async def compute_group_rewards(
        self, trajectory_group: list[Trajectory], env_group: Sequence[Env]
    ) -> list[tuple[float, Metrics]]:
        answers = [self.get_response_message(trajectory)[0] for trajectory in trajectory_group]
        rates = [await self._win_rate(answer) for answer in answers]
        return [(rate, {"win_rate": rate}) for rate in rates]

    async def _win_rate(self, answer: list[Message]) -> float:
        target = self.eval_target_completion_A
        assert target is not None
        comparison = self.comparison_reward_for_second_messages(target, answer)
        forward, backward = await asyncio.gather(
            self.preference_model(comparison), self.preference_model(comparison.swap())
        )
        return (forward - backward + 2) / 4


@chz.chz
class TournamentBuilder(PairwisePreferenceRLDatasetBuilder):
    """Builder of prompts from comparisons; each answer competes with the others of its group.

    The metric of held-out rows is the `win_rate` against their chosen answers.
    """

    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        model = self.preference_model_builder()
        train, _ = await PairwisePreferenceRLDatasetBuilder.__call__(
            chz.replace(self, preference_model_builder=lambda: model)
        )
        comparisons = held_out_comparisons(
            self.comparison_builder, self.comparison_builder.get_train_and_test_datasets()[1]
        )
        if comparisons is None:
            return train, None
        groups = self._held_out(comparisons, model)
        return train, Groups(groups, len(groups))

    def _held_out(self, comparisons: Comparisons, model: PreferenceModel) -> list[ChosenAnswerGroupBuilder]:
        renderer = renderers.get_renderer(self.policy_renderer_name, get_tokenizer(self.policy_model_name))
        rows = [comparisons[index] for index in range(len(comparisons))]
        return [
            ChosenAnswerGroupBuilder(
                convo_prefix=list(row.prompt),
                policy_renderer=renderer,
                tournament_pattern=TournamentPattern.ALL_PAIRS_BOTH_WAYS,
                preference_model=model,
                num_envs=1,
                content_preprocessor=self.content_preprocessor,
                eval_target_completion_A=list(row.chosen),
            )
            for row in rows
        ]
