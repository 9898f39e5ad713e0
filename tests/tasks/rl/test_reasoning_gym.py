"""Every dataset of reasoning-gym by its name; `make slow` installs the package."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tinker_cookbook.tokenizer_utils import get_tokenizer

from blocks.errors import ConfigError
from engine.tiny import byte_tokenizer
from tasks.common.builders import build
from tasks.rl.environments.reasoning_gym import GymEnv, create_gym_dataset

pytestmark = pytest.mark.slow
BUILDER = "tasks.rl.environments.reasoning_gym:GymBuilder"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("gym-tokenizer")
    byte_tokenizer().save_pretrained(folder)
    return get_tokenizer(str(folder))


def problems(tokenizer: Any, **params: Any) -> list[list[Any]]:
    """Environments of the problems by part: training and held-out."""
    params = {"batch_size": 1, "group_size": 1, "num_problems": 2, **params}
    parts = build("environment", BUILDER, params, tokenizer, lambda builder: asyncio.run(builder()))
    return [
        [asyncio.run(part.get_batch(index)[0].make_envs())[0].message_env for index in range(len(part))]
        for part in parts
        if part is not None
    ]


def grade(env: GymEnv, text: str) -> tuple[float, dict[str, float]]:
    result = asyncio.run(env.step({"role": "assistant", "content": text}))
    return result.reward, result.metrics


def test_every_dataset_rewards_its_own_answer_and_accepts_any_text(tokenizer: Any) -> None:
    from reasoning_gym.factory import DATASETS

    assert len(DATASETS) > 100
    for name in sorted(DATASETS.keys() - {"composite"}):
        for env in problems(tokenizer, dataset=name)[0]:
            for junk in ("", "banana", "[1,", "12", "None", "x**2", "{'a': 1}"):
                assert -0.1 <= grade(env, f"<answer>{junk}</answer>")[0] <= 1.0, (name, junk)
            assert grade(env, "I do not know.")[0] == -0.1
            if env.entry["answer"] is not None:  # None in a few datasets whose problems have many solutions
                assert grade(env, f"So it is <answer>{env.entry['answer']}</answer>")[0] > 0, name


def test_config_sets_difficulty_and_seed_selects_problems(tokenizer: Any) -> None:
    config = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    params = {"dataset": "chain_sum", "config": config, "num_problems": 20, "num_held_out": 1}
    train, test = problems(tokenizer, **params)
    questions = [env.entry["question"] for env in train]
    assert questions == [env.entry["question"] for env in problems(tokenizer, **params)[0]]
    assert questions != [env.entry["question"] for env in problems(tokenizer, **params, seed=1)[0]]
    assert all(abs(int(env.entry["answer"])) <= 18 for env in [*train, *test])


def test_examples_precede_the_problem_and_tags_are_optional(tokenizer: Any) -> None:
    params = {"dataset": "chain_sum", "num_examples": 2, "instruction": "", "tags": False}
    env = problems(tokenizer, **params)[0][0]
    conversation = asyncio.run(env.initial_observation())
    assert [message["role"] for message in conversation] == ["user", "assistant", "user", "assistant", "user"]
    assert grade(env, env.entry["answer"])[0] == 1
    assert 0 < grade(env, f"It is {env.entry['answer']}, I think.")[0] < 1


def test_composite_draws_from_its_datasets(tokenizer: Any) -> None:
    datasets = [{"name": "gcd"}, {"name": "chain_sum", "weight": 2.0, "config": {"max_terms": 3}}]
    train = problems(tokenizer, dataset="composite", config={"datasets": datasets}, num_problems=12)[0]
    assert {env.entry["metadata"]["source_dataset"] for env in train} == {"gcd", "chain_sum"}
    with pytest.raises(ConfigError, match="reasoning-gym has no dataset 'nothing': choose one of ab, acre"):
        create_gym_dataset("nothing", {})
