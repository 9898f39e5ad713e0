"""Scored terms on supervised data with one completion per prompt train on sampled candidates."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tinker
import torch
from mlflow import MlflowClient
from sft_config import sft_fields

from flows.config.train import SftConfig
from flows.estimates.supervised import estimate
from flows.sft import sft
from objectives.errors import ObjectiveError
from objectives.labels import number_prompts
from tasks.supervised.dataset import build_dataset
from tasks.training.candidates import Completion, pack_candidates

pytestmark = pytest.mark.usefixtures("prefect_server", "api_key")
CANDIDATES = {"num": 3, "max_tokens": 40, "every": 2}


def fields(folder: Path, run_name: str, mlflow_uri: str, engine_url: str, **changes: Any) -> SftConfig:
    """Config of a run of four steps with one completion per prompt and a penalty on repeated tokens."""
    config = sft_fields(folder, run_name, mlflow_uri, engine_url)
    config["data"]["params"]["contrast"] = False
    penalty = {"name": "repetition", "weight": 3.0, "params": {"n": 1}}
    config |= {"num_steps": 4, "eval_every": 0, "objective": {"regularizers": [penalty]}, "candidates": CANDIDATES}
    return SftConfig.model_validate(config | changes)


@pytest.mark.parametrize("overlap", [pytest.param(True, marks=pytest.mark.slow), False])
def test_a_budget_covers_candidates(tmp_path: Path, engine_url: str, mlflow_uri: str, overlap: bool) -> None:
    """Their tokens and their passes cost most of each step."""
    prices = tmp_path / "prices.json"
    row = {"tinker_id": "tiny", "prefill": "$10", "sample": "$100", "train": "$1000", "cached_prefill": "$1"}
    prices.write_text(json.dumps([row]))
    changes = {"candidates": {"num": 8, "max_tokens": 40, "overlap": overlap}}
    config = fields(
        tmp_path, "unlimited", mlflow_uri, engine_url, budget={"prices": str(prices)}, num_steps=5, **changes
    )
    history = MlflowClient(mlflow_uri).get_metric_history(sft(config).mlflow_run_id, "cost/usd")
    usd = {point.step: point.value for point in history}
    limit = usd[3] + 0.1 * (usd[4] - usd[3])
    budget = {"prices": str(prices), "usd": limit}
    limited = sft(config.model_copy(update={"run_name": "limited", "budget": config.budget.model_validate(budget)}))
    assert "would have cost" in limited.stopped
    assert 2 <= limited.num_steps < 5
    assert limited.metrics["cost/budget_share"] <= 1


@pytest.mark.parametrize("overlap", [True, False])
def test_sampled_candidates_train_and_are_stored(
    tmp_path: Path, engine_url: str, mlflow_uri: str, overlap: bool
) -> None:
    config = fields(
        tmp_path, f"candidates-{overlap}", mlflow_uri, engine_url, candidates=CANDIDATES | {"overlap": overlap}
    )
    result = sft(config)
    directory = tmp_path / "runs" / config.run_name
    assert sorted(path.name for path in directory.glob("candidates-*")) == [
        "candidates-000000.json",
        "candidates-000002.json",
    ]
    stored = json.loads((directory / "candidates-000002.json").read_text())
    assert [len(group) for group in stored] == [3, 3], "two prompts with three candidates each"
    assert all(len(row["tokens"]) == len(row["logprobs"]) <= 40 for group in stored for row in group)
    client = MlflowClient(mlflow_uri)
    run = client.get_run(result.mlflow_run_id)
    assert run.data.tags["tinker_flows.estimator.repetition"] == (
        "score_function, because every prompt of the data has one completion, so that the model samples candidates"
    )
    assert run.data.metrics["candidates/truncated"] > 0.5
    (text,) = [text for text in result.warnings if "reached candidates.max_tokens" in text]
    assert " at step 0 " in text, "it is given once"
    definition = run.data.tags["tinker_flows.term.repetition"]
    assert definition == (
        "Share of repeated n-grams, 1 - distinct n-grams / n-grams, per datum, over its trained tokens."
    )
    assert f"repetition: {definition}" in Path(result.report).read_text()
    logged = {
        key: sorted((point.step, point.value) for point in client.get_metric_history(result.mlflow_run_id, key))
        for key in ("candidates/num", "term/repetition/value", "term/repetition/grad_share", "cost/num_sample_tokens")
    }
    assert logged["candidates/num"] == [(0, 6.0), (2, 6.0)]
    # The value is the share of repeated tokens, counted from the stored samples.
    shares = [1 - len(set(row["tokens"])) / len(row["tokens"]) for group in stored for row in group]
    value = dict(logged["term/repetition/value"])[2]
    if not overlap:  # importance weights are exactly 1 for the current weights
        assert value == pytest.approx(sum(shares) / len(shares), abs=1e-4)
    assert [step for step, share in logged["term/repetition/grad_share"] if share > 0.01] == [0, 2]
    num_tokens = sum(
        len(row["tokens"])
        for path in directory.glob("candidates-*")
        for group in json.loads(path.read_text())
        for row in group
    )
    assert logged["cost/num_sample_tokens"][-1][1] == num_tokens
    trained = result.metrics["cost/num_train_tokens"]
    estimated = estimate(config.model_copy(update={"run_name": "estimated"})).num_train_tokens
    assert trained <= estimated <= 1.1 * trained, "nearly all candidates have the maximum length"


def test_without_candidates_such_a_term_is_rejected_before_the_first_step(
    tmp_path: Path, engine_url: str, mlflow_uri: str
) -> None:
    config = fields(tmp_path, "rejected", mlflow_uri, engine_url, candidates=False)
    assert config.candidates == "off"
    explicit = config.model_dump()
    explicit["objective"]["regularizers"][0]["estimator"] = "score_function"
    with pytest.raises(ObjectiveError, match="its estimator 'score_function' needs samples of the model"):
        sft(SftConfig.model_validate(explicit | {"run_name": "explicit"}))
    with pytest.raises(
        ObjectiveError,
        match=r"The scores of repetition cannot train, because every prompt of the data has one completion; provide",
    ):
        sft(config)
    assert not (tmp_path / "runs" / "rejected" / "checkpoints.jsonl").exists()


def test_candidates_that_no_term_needs_are_reported(tmp_path: Path, engine_url: str, mlflow_uri: str) -> None:
    config = fields(
        tmp_path, "unused", mlflow_uri, engine_url, num_steps=1, objective={"regularizers": [{"name": "confidence"}]}
    )
    result = sft(config)
    tags = MlflowClient(mlflow_uri).get_run(result.mlflow_run_id).data.tags
    assert tags["tinker_flows.warning.pitfall.candidates"].startswith("candidates is set, but no term needs them")
    assert not list((tmp_path / "runs" / "unused").glob("candidates-*"))


def test_the_update_of_candidates_is_the_score_function_gradient(
    tmp_path: Path, engine_url: str, mlflow_uri: str
) -> None:
    """The logprobs after one step equal those of a plain SDK loop with weights computed by hand."""
    config = fields(
        tmp_path, "by-hand", mlflow_uri, engine_url, num_steps=1, candidates=CANDIDATES | {"overlap": False}
    )
    result = sft(config)
    service = tinker.ServiceClient(base_url=engine_url, api_key="tml-test")
    by_hand = service.create_lora_training_client("tiny", rank=config.lora_rank, seed=config.seed).result()
    tokenizer = by_hand.get_tokenizer()
    source = build_dataset(config.data.builder, config.data.params, tokenizer, config.seed)
    batch = source.batch_at(0)
    stored = json.loads((tmp_path / "runs" / "by-hand" / "candidates-000000.json").read_text())
    data = list(batch.datums)
    num_tokens = sum(int((datum.loss_fn_inputs["weights"].to_torch() != 0).sum()) for datum in data)
    mass = sum(float(datum.loss_fn_inputs["weights"].to_torch().sum()) for datum in data)
    candidates: list[tinker.Datum] = []
    num_prompt_tokens = 0
    for datum, group in zip(data, stored, strict=True):
        weights = datum.loss_fn_inputs["weights"].to_torch()
        prompt = datum.model_input.to_ints()[: int((weights != 0).nonzero()[0]) + 1]
        num_prompt_tokens += len(prompt)
        scores = [1 - len(set(row["tokens"])) / len(row["tokens"]) for row in group]
        assert len(set(scores)) > 1, "the candidates can be compared"
        for row, score in zip(group, scores, strict=True):
            baseline = (sum(scores) - score) / (len(scores) - 1)
            # Weight 3, two prompts, three samples each; the base loss has `mass` over two completions.
            factor = -3.0 * (score - baseline) / (2 * 3) * mass * len(data) / num_tokens
            tokens = prompt + row["tokens"]
            loss_weights = [0.0] * (len(prompt) - 1) + [factor] * len(row["tokens"])
            inputs = {
                "target_tokens": tinker.TensorData.from_torch(torch.tensor(tokens[1:])),
                "weights": tinker.TensorData.from_torch(torch.tensor(loss_weights)),
            }
            candidates.append(tinker.Datum(model_input=tinker.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs))
    assert result.metrics["cost/num_prefill_tokens"] == 3 * num_prompt_tokens
    assert result.metrics["cost/num_cached_tokens"] >= 2 * num_prompt_tokens
    estimated = estimate(config).candidates
    assert (estimated.num_prefill_tokens, estimated.num_cached_tokens) == (3 * num_prompt_tokens, 2 * num_prompt_tokens)
    by_hand.forward_backward(data, "cross_entropy")
    by_hand.forward_backward(candidates, "cross_entropy")
    adam = tinker.AdamParams(learning_rate=config.learning_rate, **config.adam.model_dump())
    by_hand.optim_step(adam).result()
    trained = service.create_training_client_from_state(result.state_path).result()
    expected, actual = (
        torch.cat(
            [output["logprobs"].to_torch() for output in client.forward(data, "cross_entropy").result().loss_fn_outputs]
        )
        for client in (by_hand, trained)
    )
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4)


def test_packed_candidates_train_only_sampled_tokens(tmp_path: Path, engine_url: str) -> None:
    service = tinker.ServiceClient(base_url=engine_url, api_key="tml-test")
    tokenizer = service.create_lora_training_client("tiny", rank=1).result().get_tokenizer()
    config = fields(tmp_path, "packed", "", engine_url)
    batch = build_dataset(config.data.builder, config.data.params, tokenizer, 0).batch_at(0)
    completions = [[Completion((5, 6), (-1.0, -2.0), truncated=False), Completion((7,), (-3.0,), truncated=True)]]
    batch = replace(batch, text_labels_D={"rules": ("a", "b")})
    packed = pack_candidates(batch, [1], [[1, 2, 3]], completions, tokenizer)
    assert packed.text_labels_D == {"rules": ("b", "b")}
    assert packed.target_tokens_DT.tolist() == [2, 3, 5, 6, 2, 3, 7]
    assert packed.mask_DT.tolist() == [False, False, True, True, False, False, True]
    assert packed.sampling_logprobs_DT is not None
    assert packed.sampling_logprobs_DT.tolist() == [0, 0, -1, -2, 0, 0, -3]
    assert number_prompts(packed).tolist() == [0, 0]
    assert packed.texts_D == (tokenizer.decode([5, 6]), tokenizer.decode([7]))
