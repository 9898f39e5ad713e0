"""Reference of another base model: its logprobs, its price, and the check of its tokenizer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tinker
import torch
from engine_process import API_KEY, running_engine
from metric_history import curve
from rl_config import rl_fields
from safetensors.torch import load_file, save_file
from sft_config import sft_fields
from tinker import types

from blocks.errors import ConfigError
from engine.models import resolve_model
from flows.compare import CompareConfig, compare
from flows.config.rl import RlConfig
from flows.config.train import SftConfig
from flows.estimates.supervised import estimate
from flows.rl import rl
from flows.sft import sft
from tasks.rl import rollout_source

pytestmark = [pytest.mark.usefixtures("prefect_server"), pytest.mark.process]


@dataclass(frozen=True)
class Engine:
    """Engine with the tiny model, the same architecture with other weights, and one with another tokenizer."""

    url: str
    other: str
    foreign: str


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("two-models")
    tiny = resolve_model("tiny", folder / "cache")
    other, foreign = folder / "models" / "other", folder / "models" / "foreign"
    for directory in (other, foreign):
        shutil.copytree(tiny, directory)
    weights = load_file(other / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    moved = {name: value + 0.05 * torch.randn(value.shape, generator=generator) for name, value in weights.items()}
    save_file(moved, other / "model.safetensors", metadata={"format": "pt"})
    tokenizer = json.loads((foreign / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (foreign / "tokenizer.json").write_text(json.dumps(tokenizer))
    with running_engine(folder / "engine", ["tiny", str(other), str(foreign)]) as engine:
        yield Engine(engine.url, str(other), str(foreign))


@pytest.fixture(autouse=True)
def api_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_API_KEY", API_KEY)


def expected_kl(engine: Engine, turns: list[tuple[list[int], list[int]]]) -> float:
    """Mean of ``log p - log p_ref`` over the tokens of turns, pairs of prompt and sample, scored by the SDK alone."""
    session = tinker.ServiceClient(base_url=engine.url, api_key=API_KEY)
    tiny, other = (session.create_sampling_client(base_model=name).result() for name in ("tiny", engine.other))
    distances: list[float] = []
    for prompt, tokens in turns:
        sequence = types.ModelInput.from_ints([*prompt, *tokens])
        ours, theirs = (client.compute_logprobs(sequence).result()[len(prompt) :] for client in (tiny, other))
        distances += [a - b for a, b in zip(ours, theirs, strict=True) if a is not None and b is not None]
    return sum(distances) / len(distances)


def test_penalty_and_term_read_the_other_model(
    tmp_path: Path, models: Engine, mlflow_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampled: list[tuple[list[int], list[int]]] = []
    compute = rollout_source.compute_group_metrics

    def record(groups: Any) -> Any:
        sampled.extend(
            (turn.ob.to_ints(), turn.ac.tokens)
            for group in groups
            for trajectory in group.trajectories.trajectories_G
            for turn in trajectory.transitions
        )
        return compute(groups)

    monkeypatch.setattr(rollout_source, "compute_group_metrics", record)
    fields = rl_fields(tmp_path, "other", mlflow_uri, models.url) | {"num_steps": 1, "eval_every": 0}
    fields |= {"reference": models.other, "advantage": {"kl_coefficient": 0.1}}
    fields["objective"] = {"base_loss": "importance_sampling", "regularizers": [{"name": "kl", "weight": 0.1}]}
    prices = tmp_path / "prices.json"
    rows = [("tiny", 100), (models.other, 10_000)]
    keys = ("tinker_id", "prefill", "sample", "train")
    prices.write_text(json.dumps([dict(zip(keys, (name, price, 0, 0), strict=True)) for name, price in rows]))
    result = rl(RlConfig.model_validate(fields | {"budget": {"prices": str(prices)}}))
    (value,) = curve(result, "kl_policy_base")
    assert value > 0.05
    assert value == pytest.approx(expected_kl(models, sampled), abs=1e-4)
    # The term `kl` has the same reference: its estimate of the same samples is positive from the first step.
    assert curve(result, "term/kl/value")[0] > 0.01
    # The reference scores each sequence once, for the penalty and the term, at its own price.
    num_prompt = sum(len(prompt) for prompt, _ in sampled)
    num_scored = sum(len(prompt) + len(tokens) for prompt, tokens in sampled)
    assert result.metrics["cost/num_prefill_tokens"] == num_prompt + num_scored
    assert result.metrics["cost/usd"] == pytest.approx((100 * num_prompt + 10_000 * num_scored) / 1e6)


def test_estimate_uses_the_price_of_the_other_model(tmp_path: Path, models: Engine, mlflow_uri: str) -> None:
    prices = tmp_path / "prices.json"
    rows = [{"tinker_id": "tiny", "prefill": 1, "sample": 0, "train": 0}]
    prices.write_text(json.dumps([*rows, {"tinker_id": models.other, "prefill": 7, "sample": 0, "train": 0}]))
    fields = sft_fields(tmp_path, "priced", mlflow_uri, models.url) | {"num_steps": 2, "eval_every": 0}
    fields |= {"objective": {"regularizers": [{"name": "kl", "weight": 0.1}]}, "budget": {"prices": str(prices)}}
    estimated = estimate(SftConfig.model_validate(fields | {"reference": models.other}))
    assert estimated.usd == pytest.approx(7 * estimated.reference.num_prefill_tokens / 1e6)
    assert estimated.usd is not None
    assert estimate(SftConfig.model_validate(fields)).usd == pytest.approx(estimated.usd / 7)
    session = tinker.ServiceClient(base_url=models.url, api_key=API_KEY)
    path = session.create_lora_training_client(models.other, rank=4).result().save_state("start").result().path
    assert estimate(SftConfig.model_validate(fields | {"reference": path})).usd == estimated.usd


def test_other_tokenizers_and_unknown_models_are_refused(tmp_path: Path, models: Engine, mlflow_uri: str) -> None:
    fields = sft_fields(tmp_path, "refused", mlflow_uri, models.url) | {"num_steps": 1, "eval_every": 0}
    fields["objective"] = {"regularizers": [{"name": "kl", "weight": 0.1}]}
    session = tinker.ServiceClient(base_url=models.url, api_key=API_KEY)
    client = session.create_lora_training_client(models.foreign, rank=4).result()
    paths = [client.save_state("start").result().path, client.save_weights_for_sampler("start").result().path]
    for reference in (models.foreign, *paths):
        with pytest.raises(ConfigError, match="has another tokenizer than tiny: use a reference with the same tok"):
            sft(SftConfig.model_validate(fields | {"reference": reference}))
    questions = Path(__file__).parents[3] / "examples" / "data" / "gsm8k_test.jsonl"
    places = {key: fields[key] for key in ("base_url", "storage", "tracking")} | {
        "run_name": "compared",
        "model": "tiny",
    }
    sampling = {"path": str(questions), "renderer_name": "qwen3_instruct", "limit": 1, "max_tokens": 1}
    with pytest.raises(ConfigError, match=r"base and tinker://.* have different tokenizers: compare weights of models"):
        compare(CompareConfig.model_validate({**places, **sampling, "checkpoint": "base", "against": paths[0]}))
    with pytest.raises(ConfigError, match="reference is 'tinny', which is no model of the service"):
        sft(SftConfig.model_validate(fields | {"reference": "tinny"}))
