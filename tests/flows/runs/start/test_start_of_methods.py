"""Runs of dpo and rl that start from given weights, compared with tinker-cookbook's loops on the same data."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import chz
import pytest
import tinker
from dpo_config import dpo_fields
from engine_process import API_KEY
from mlflow import MlflowClient
from rl_config import rl_fields
from tinker import types
from tinker_cookbook.completers import StopCondition, TokenCompleter, TokensWithLogprobs
from tinker_cookbook.preference import train_dpo
from tinker_cookbook.preference.dpo_datasets import DPODatasetBuilderFromComparisons
from tinker_cookbook.preference.preference_datasets import ComparisonBuilderFromJsonl
from tinker_cookbook.rl import train as cookbook_rl
from tinker_cookbook.rl.metrics import incorporate_kl_penalty
from tinker_cookbook.rl.types import Action, ActionExtra, Env, EnvGroupBuilder, RLDataset, RLDatasetBuilder, StepResult
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig

from flows.config.dpo import DpoConfig
from flows.config.rl import RlConfig
from flows.dpo import dpo
from flows.rl import rl

pytestmark = pytest.mark.usefixtures("prefect_server")
PAIRS = Path(__file__).parents[4] / "examples" / "data" / "preferences_train.jsonl"
NUM_STEPS = 3
RATE = 3e-3


@pytest.fixture(autouse=True)
def service(engine_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_API_KEY", API_KEY)
    monkeypatch.setenv("TINKER_BASE_URL", engine_url)


@pytest.fixture
def start() -> str:
    """Path of weights that differ from those of the base model."""
    tokens = list(range(5, 21))
    inputs = {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)}
    datum = tinker.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)  # pyright: ignore
    with tinker.ServiceClient() as client:
        trainer = client.create_lora_training_client("tiny", rank=4).result()
        for _ in range(4):
            trainer.forward_backward([datum], "cross_entropy").result()
            trainer.optim_step(types.AdamParams(learning_rate=1e-2)).result()
        return trainer.save_state("start").result().path


@pytest.fixture
def model_name() -> str:
    """Name by which tinker-cookbook finds the tokenizer of the model."""
    with tinker.ServiceClient() as client:
        info = client.create_lora_training_client(base_model="tiny", rank=1).result().get_info()
    return str(info.model_data.tokenizer_id)


def curves(mlflow_uri: str, run_id: str, names: Sequence[str]) -> dict[str, list[float]]:
    client = MlflowClient(mlflow_uri)
    histories = {name: client.get_metric_history(run_id, name) for name in names}
    return {name: [p.value for p in sorted(history, key=lambda p: p.step)] for name, history in histories.items()}


def cookbook_curves(directory: Path, names: Sequence[str]) -> dict[str, list[float]]:
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return {name: [line[name] for line in lines if name in line] for name in names}


def assert_equal(actual: dict[str, list[float]], expected: dict[str, list[float]]) -> None:
    for name, values in expected.items():
        assert len(values) == NUM_STEPS, name
        assert actual[name] == pytest.approx(values, abs=1e-6, rel=1e-5), name


def test_losses_of_dpo_equal_the_cookbooks(tmp_path: Path, mlflow_uri: str, start: str, model_name: str) -> None:
    """The start is also the reference of both loops. A batch is the whole data, so the order does not matter."""
    rows = tmp_path / "pairs.jsonl"
    rows.write_text("".join(PAIRS.read_text().splitlines(keepends=True)[:4]))
    common = ChatDatasetBuilderCommonConfig(
        model_name_for_tokenizer=model_name, renderer_name="role_colon", max_length=None, batch_size=4
    )
    comparisons = ComparisonBuilderFromJsonl(train_path=str(rows))
    config = train_dpo.Config(
        log_path=str(tmp_path / "cookbook"), model_name=model_name, recipe_name="test", lora_rank=4,
        dataset_builder=DPODatasetBuilderFromComparisons(common_config=common, comparison_builder=comparisons),
        load_checkpoint_path=start, learning_rate=RATE, num_epochs=NUM_STEPS, save_every=0, eval_every=0,
        infrequent_eval_every=0,
    )  # fmt: skip
    train_dpo.main(config)
    names = ["dpo_loss", "margin", "chosen_reward", "rejected_reward"]
    expected = cookbook_curves(tmp_path / "cookbook", names)
    assert expected["dpo_loss"][1] != expected["dpo_loss"][0]

    fields: dict[str, Any] = dpo_fields(tmp_path, "warm", mlflow_uri, config.base_url or "")
    fields |= {"num_steps": None, "num_epochs": NUM_STEPS, "eval_every": 0, "init_from": start}
    fields["comparisons"]["params"] = {"train_path": str(rows)}
    result = dpo(DpoConfig.model_validate(fields))
    actual = curves(mlflow_uri, result.mlflow_run_id, names)
    assert actual["dpo_loss"] == pytest.approx(expected["dpo_loss"], abs=1e-6, rel=0)
    assert_equal(actual, expected)


@dataclass
class TwoTurns(Env):
    """Environment of two turns; the prompt and the rewards depend on the member alone."""

    number: int
    history: list[int] = field(default_factory=list)
    num_turns: int = 0

    async def initial_observation(self) -> tuple[types.ModelInput, StopCondition]:
        self.history = [70, 71, 80 + self.number]
        return types.ModelInput.from_ints(self.history), []

    async def step(self, action: Action, *, extra: ActionExtra | None = None) -> StepResult:
        self.num_turns += 1
        self.history += [*action, 90 + self.number]
        reward = (self.number + 1.0) * self.num_turns
        return StepResult(reward, self.num_turns == 2, types.ModelInput.from_ints(self.history), [])


@dataclass(frozen=True)
class TwoTurnsGroup(EnvGroupBuilder):
    first: int

    async def make_envs(self) -> Sequence[Env]:
        return [TwoTurns(self.first), TwoTurns(self.first + 1)]


class TwoTurnsDataset(RLDataset):
    def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
        return [TwoTurnsGroup(0), TwoTurnsGroup(2)]

    def __len__(self) -> int:
        return NUM_STEPS


@chz.chz
class TwoTurnsBuilder(RLDatasetBuilder):
    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        return TwoTurnsDataset(), None


@dataclass
class Greedy(TokenCompleter):
    """Completer of the likeliest tokens, with their logprobs under the policy."""

    sampling_client: tinker.SamplingClient
    max_tokens: int

    async def __call__(
        self, model_input: tinker.ModelInput, stop: StopCondition, *, max_tokens: int | None = None
    ) -> TokensWithLogprobs:
        params = types.SamplingParams(stop=stop, max_tokens=self.max_tokens, temperature=0.0)
        response = await self.sampling_client.sample(model_input, 1, params)
        (sequence,) = response.sequences
        return TokensWithLogprobs(sequence.tokens, sequence.logprobs, sequence.stop_reason)


async def penalize_sampled_tokens(data_D: list[tinker.Datum], *arguments: Any) -> dict[str, float]:
    """Add tinker-cookbook's KL penalty to the advantages of the sampled tokens alone.

    With a discount, its own function also gives advantages to the tokens before and between the completions, which are
    then trained as if they were sampled with the probability 1.
    """
    metrics = await incorporate_kl_penalty(data_D, *arguments)
    for datum in data_D:
        inputs = datum.loss_fn_inputs
        sampled = inputs["advantages"].to_torch() * inputs["mask"].to_torch()
        inputs["advantages"] = tinker.TensorData.from_torch(sampled)
    return metrics


@pytest.mark.parametrize("discount", [0.0, 0.9])
def test_steps_of_rl_equal_the_cookbooks(
    tmp_path: Path, mlflow_uri: str, start: str, model_name: str, discount: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Episodes of two turns, two updates per step and a penalized KL; the likeliest tokens, so that samples repeat.

    The entropy and the KL between sampler and trainer are functions of the weights of each step and substep.
    """
    monkeypatch.setattr(cookbook_rl, "incorporate_kl_penalty", penalize_sampled_tokens)
    config = cookbook_rl.Config(
        log_path=str(tmp_path / "cookbook"), model_name=model_name, recipe_name="test", renderer_name="role_colon",
        dataset_builder=TwoTurnsBuilder(), learning_rate=RATE, max_tokens=4, lora_rank=4, temperature=0.0,
        num_substeps=2, load_checkpoint_path=start, kl_penalty_coef=0.5, kl_discount_factor=discount,
        kl_reference_config=cookbook_rl.KLReferenceConfig(base_model="tiny"), save_every=0, eval_every=0,
        num_groups_to_log=0,
    )  # fmt: skip
    asyncio.run(cookbook_rl.main(config))
    names = ["env/all/reward/total", "kl_policy_base", "optim/entropy", "optim/kl_sample_train_v2"]
    expected = cookbook_curves(tmp_path / "cookbook", names)
    assert min(expected["optim/kl_sample_train_v2"]) > 1e-6, "the second update starts from other weights"

    fields: dict[str, Any] = rl_fields(tmp_path, "warm", mlflow_uri, "")
    fields |= {
        "num_steps": NUM_STEPS,
        "lora_rank": 4,
        "learning_rate": RATE,
        "lr_schedule": "constant",
        "eval_every": 0,
        "init_from": start,
        "schedule": {"num_substeps": 2},
        "rollout": {"max_tokens": 4, "completer": {"builder": f"{__name__}:Greedy"}},
        "advantage": {"kl_coefficient": 0.5, "kl_discount_factor": discount},
        "environment": {"builder": f"{__name__}:TwoTurnsBuilder"},
        "objective": {"base_loss": "importance_sampling"},
    }
    result = rl(RlConfig.model_validate(fields))
    assert_equal(curves(mlflow_uri, result.mlflow_run_id, names), expected)
