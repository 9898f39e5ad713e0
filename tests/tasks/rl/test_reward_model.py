"""Rewards of groups from reward models and from judges of pairs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import tinker
import torch
from tinker_cookbook.completers import TinkerMessageCompleter, TokensWithLogprobs
from tinker_cookbook.renderers import Message, get_renderer, get_text_content
from tinker_cookbook.rl.types import EnvGroupBuilder, Trajectory, Transition

from blocks.errors import ConfigError
from examples.preferences import DATA
from objectives.batch import Outputs
from objectives.evaluate import evaluate_base
from objectives.objective import Objective
from tasks.preference import preference_models
from tasks.preference.dataset import Rendering, Verdict, build_comparisons
from tasks.preference.pair_source import PairBatches
from tasks.preference.ranking_evaluator import RankingEvaluator
from tasks.rl.rollout_source import build_environments

JSONL = "tinker_cookbook.preference.preference_datasets:ComparisonBuilderFromJsonl"
PATHS = {"train_path": str(DATA / "preferences_train.jsonl"), "test_path": str(DATA / "preferences_test.jsonl")}
NESTED = {"comparison_builder": JSONL} | {f"comparison_builder.{name}": path for name, path in PATHS.items()}
SIZES = {"batch_size": 2, "group_size": 2}


@pytest.fixture(scope="module")
def client(engine_url: str) -> Iterator[tinker.TrainingClient]:
    with tinker.ServiceClient(base_url=engine_url, api_key="tml-test") as service:
        yield service.create_lora_training_client("tiny", rank=4, seed=0).result()


def rewards(
    group: EnvGroupBuilder, client: tinker.TrainingClient, *completions: str
) -> list[tuple[float, Mapping[str, Any]]]:
    """Reward and metrics of each member of a group with these completions."""
    tokenizer = client.get_tokenizer()
    actions = [TokensWithLogprobs(tokenizer.encode(text), [0.0], "stop") for text in completions]
    trajectories = [
        Trajectory([Transition(tinker.ModelInput.empty(), action, 0.0, True)], tinker.ModelInput.empty())
        for action in actions
    ]
    return asyncio.run(group.compute_group_rewards(trajectories, []))  # pyright: ignore[reportReturnType]


def test_score_equals_the_reward_that_bradley_terry_trains(client: tinker.TrainingClient, engine_url: str) -> None:
    tokenizer = client.get_tokenizer()
    verdict = Verdict("Good?", "Yes")
    data, _ = build_comparisons(JSONL, PATHS, tokenizer)
    pairs = PairBatches(
        data, Rendering(get_renderer("qwen3_instruct", tokenizer), 256, verdict), tokenizer, adds_mismatched=False
    )
    batch = pairs.batch([0])
    assert batch.texts_D == ("Yes<|im_end|>",) * 2
    output = client.forward(list(batch.datums), "cross_entropy").result()
    logprobs_DT = torch.cat([entry["logprobs"].to_torch() for entry in output.loss_fn_outputs])
    trained = evaluate_base(Objective("bradley_terry").base, Outputs(logprobs_DT, None), batch).metrics

    path = client.save_state("judge").result().path
    with tinker.ServiceClient(base_url=engine_url, api_key="tml-test") as session:
        train, test = build_environments(
            "tasks.rl.environments.reward_model:RewardModelBuilder",
            NESTED | SIZES | {"path": path, "question": "Good?", "good": "Yes"},
            tokenizer,
            {"session": session},
        )
        (group, _) = train.get_batch(0)
        texts = [data[0].chosen[0]["content"], data[0].rejected[0]["content"]]
        (chosen, metrics), (rejected, truncated) = rewards(group, client, f"{texts[0]}<|im_end|>", str(texts[1]))
    assert metrics["score"] == chosen == pytest.approx(trained["chosen_reward"], abs=1e-4)
    assert truncated["score"] == pytest.approx(trained["rejected_reward"], abs=1e-4)
    assert rejected == truncated["score"] - 1, "the completion has no end token"
    assert test is not None
    assert len(test.get_batch(0)) == 64


def longer(row: Mapping[str, str], first: str, second: str) -> float:
    assert row["question"].startswith("What is ")
    return 1.0 if len(first) > len(second) else 0.0


def test_completions_compete_within_their_group_and_held_out_ones_with_the_chosen_answer(
    client: tinker.TrainingClient,
) -> None:
    params = {"preference_model_builder": "tasks.preference.preference_models:JudgeBuilder"}
    judge = {"preference_model_builder.judge": f"{__name__}:longer"}
    builder = "tasks.rl.environments.pairwise:TournamentBuilder"
    train, test = build_environments(builder, NESTED | SIZES | params | judge, client.get_tokenizer(), {})
    assert len(train) == 128
    results = rewards(train.get_batch(0)[0], client, "Seven.<|im_end|>", "It is seven.<|im_end|>", "Seven")
    assert [metrics["win_minus_loss"] for _, metrics in results] == [0.0, 1.0, -1.0]
    assert [reward for reward, _ in results] == [0.0, 1.0, -2.0]
    assert test is not None
    rates = [rewards(test.get_batch(0)[0], client, f"{text}<|im_end|>")[0][1]["win_rate"] for text in ("No.", "o" * 90)]
    assert rates == [0.0, 1.0]


@pytest.mark.parametrize("kind", ["pairwise:TournamentBuilder", "reward_model:RewardModelBuilder"])
def test_held_out_rows_without_a_comparison_are_rejected(
    client: tinker.TrainingClient, engine_url: str, tmp_path: Path, kind: str
) -> None:
    rows = [json.loads(line) | {"label": "Tie"} for line in Path(PATHS["test_path"]).read_text().splitlines()]
    ties = tmp_path / "ties.jsonl"
    ties.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    own: dict[str, Any] = {"path": "", "question": "Good?", "good": "Yes"}
    if "Tournament" in kind:
        judge = "tasks.preference.preference_models:JudgeBuilder"
        own = {"preference_model_builder": judge, "preference_model_builder.judge": f"{__name__}:longer"}
    params = NESTED | SIZES | own | {"comparison_builder.test_path": str(ties)}
    with tinker.ServiceClient(base_url=engine_url, api_key="tml-test") as session:
        resources = {"session": session, "base_model": "tiny"}
        with pytest.raises(ConfigError, match="held-out rows of ComparisonBuilderFromJsonl have no comparison"):
            build_environments(f"tasks.rl.environments.{kind}", params, client.get_tokenizer(), resources)


def test_prompted_judges_are_asked_by_the_given_criteria(
    client: tinker.TrainingClient, engine_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts: list[str] = []

    class Recorded(TinkerMessageCompleter):
        async def __call__(self, messages: list[Message]) -> Message:
            prompts.append(get_text_content(messages[-1]))
            return await super().__call__(messages)

    monkeypatch.setattr(preference_models, "TinkerMessageCompleter", Recorded)
    judge = {"preference_model_builder": "tasks.preference.preference_models:PromptedJudgeBuilder"}
    own = {"model": "tiny", "max_tokens": 4, "criteria": ["brevity", "warmth"], "principles": ["Be kind."]}
    params = NESTED | SIZES | judge | {f"preference_model_builder.{name}": value for name, value in own.items()}
    with tinker.ServiceClient(base_url=engine_url, api_key="tml-test") as session:
        train, _ = build_environments(
            "tasks.rl.environments.pairwise:TournamentBuilder", params, client.get_tokenizer(), {"session": session}
        )
        rewards(train.get_batch(0)[0], client, "Seven.<|im_end|>", "It is seven.<|im_end|>")
    assert len(prompts) == 4, "both orders of each of two matches"
    for prompt in prompts:
        assert "Compare them by these criteria:\n- brevity\n- warmth\n" in prompt
        assert "A good answer follows these principles:\n- Be kind.\n" in prompt


def test_verdicts_with_the_same_first_token_are_rejected(client: tinker.TrainingClient) -> None:
    ranking = RankingEvaluator(JSONL, PATHS, "tiny", "role_colon")
    with pytest.raises(ConfigError, match="the verdicts A and B start with the same token"):
        asyncio.run(ranking.measure(client.save_weights_and_get_sampling_client().result(), client.get_tokenizer()))
