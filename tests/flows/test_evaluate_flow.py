"""Evaluation and comparison of a run's checkpoints."""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import field, replace
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from engine_process import API_KEY, engine_tokens
from metric_history import history
from mlflow import MlflowClient
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey
from pydantic import ValidationError
from pydantic.dataclasses import dataclass
from scipy.stats import ttest_1samp, ttest_rel
from sft_config import sft_fields
from tinker_cookbook.completers import MessageCompleter
from tinker_cookbook.eval.evaluators import SamplingClientEvaluator, TrainingClientEvaluator
from tinker_cookbook.renderers import Message

from blocks.errors import ConfigError
from flows.compare import CompareConfig, CompareResult, compare
from flows.config.train import SftConfig
from flows.evaluate import EvaluateConfig, EvaluateResult, evaluate, show_evaluation
from flows.monitoring.run_tags import APPROVAL_TAG, REJECTED_TAG
from flows.runs.result import TrainResult
from flows.sft import sft
from tasks.common.sampling import Answer
from tasks.evaluation.evaluators import build_evaluator
from tasks.evaluation.grading_metrics import Graded
from tasks.evaluation.intervals import compare_scores
from tasks.evaluation.policy_metrics import vendi
from tasks.evaluation.sampled import SampledEvaluator

pytestmark = pytest.mark.usefixtures("prefect_server")

DATA = Path(__file__).parents[2] / "examples" / "data"
SHORT = {"limit": 2, "renderer_name": "qwen3_instruct", "sampling": {"max_tokens": 8, "num_samples": 2}, "pass_at": [2]}
SAMPLED = [
    {"builder": "tasks.evaluation.sampled:ExactMatch", "params": {"path": str(DATA / "gsm8k_test.jsonl"), **SHORT}},
    {"builder": "tasks.evaluation.sampled:CodeTests", "params": {"path": str(DATA / "humaneval.jsonl"), **SHORT}},
]
PLACES = ("model", "base_url", "storage", "tracking")


@pytest.fixture(scope="module")
def fields(tmp_path_factory: pytest.TempPathFactory, mlflow_uri: str, engine_url: str) -> Iterator[dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINKER_API_KEY", API_KEY)
        few = {"objective": {}, "num_steps": 3, "eval_every": 3, "checkpoint_every": 2, "evaluators": SAMPLED}
        yield sft_fields(tmp_path_factory.mktemp("evaluate"), "trained", mlflow_uri, engine_url) | few


@pytest.fixture(scope="module")
def trained(prefect_server: str, fields: dict[str, Any]) -> TrainResult:
    return sft(SftConfig.model_validate(fields))


def evaluation(fields: dict[str, Any], **changes: object) -> EvaluateResult:
    places = {key: fields[key] for key in (*PLACES[1:], "data")}
    own = {"run_name": "evaluated", "checkpoint": "trained@final"}
    return evaluate(EvaluateConfig.model_validate({**places, **own, **changes}))


@pytest.fixture(scope="module")
def evaluated(trained: TrainResult, fields: dict[str, Any]) -> EvaluateResult:
    """Evaluate with the evaluators of the run and the base model as baseline."""
    gate = {"promote_if": "test/nll < baseline", "register_as": "evaluated"}
    return evaluation(fields, evaluators=SAMPLED, baseline="base", **gate)


@pytest.fixture(scope="module")
def compared(trained: TrainResult, fields: dict[str, Any]) -> CompareResult:
    places = {key: fields[key] for key in PLACES}
    what = {"path": str(DATA / "gsm8k_test.jsonl"), "renderer_name": "qwen3_instruct", "limit": 3, "max_tokens": 12}
    judge = {"judge": {"builder": f"{__name__}:shorter"}}
    own = {"run_name": "compared", "checkpoint": "trained", "num_samples": 2}
    return compare(CompareConfig.model_validate({**places, **what, **judge, **own}))


def shorter(row: dict[str, str], first: str, second: str) -> float:
    return (1 + (len(first) < len(second)) - (len(second) < len(first))) / 2


def at_step(mlflow_uri: str, run_id: str, step: int) -> dict[str, float]:
    client = MlflowClient(mlflow_uri)
    keys = client.get_run(run_id).data.metrics
    points = [point for key in keys for point in client.get_metric_history(run_id, key)]
    return {point.key: point.value for point in points if point.step == step and point.key.startswith("test/")}


def artifact(key: str) -> list[dict[str, Any]]:
    with get_client(sync_client=True) as client:
        (artifact,) = client.read_artifacts(artifact_filter=ArtifactFilter(key=ArtifactFilterKey(any_=[key])))
    return json.loads(str(artifact.data))


def test_evaluation_equals_the_metrics_of_the_run(
    trained: TrainResult, evaluated: EvaluateResult, mlflow_uri: str
) -> None:
    assert evaluated.metrics == pytest.approx(at_step(mlflow_uri, trained.mlflow_run_id, 3), abs=1e-5)
    assert evaluated.baseline == pytest.approx(at_step(mlflow_uri, trained.mlflow_run_id, 0), abs=1e-5)
    assert {
        "test/nll",
        "test/nll_per_token",
        "test/bits_per_byte",
        "test/exact_match",
        "test/code_tests_pass_at_2",
        "test/code_tests_pass_at_2_low",
        "test/code_tests_pass_at_2_high",
    } < evaluated.metrics.keys()
    assert 0 <= evaluated.metrics["test/exact_match"] <= 1


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.usefixtures("trained")
def test_a_person_decides_about_the_registration(
    fields: dict[str, Any], mlflow_uri: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    gate = {
        "run_name": "asked",
        "register_as": "asked",
        "needs_approval": True,
        "promote_if": "test/nll < baseline",
        "baseline": "base",
    }
    client = MlflowClient(mlflow_uri)
    waits = evaluation(fields, **gate)
    assert waits.not_promoted == (
        "trained@final is not promoted, because it waits for approval: submit the form of the suspended run in the "
        "Prefect UI, or run this evaluation again in a terminal."
    )
    assert client.get_run(waits.mlflow_run_id).data.tags[REJECTED_TAG] == waits.not_promoted
    monkeypatch.setattr("sys.stdin", Terminal("refuse\n"))
    refused = evaluation(fields, **gate)
    assert refused.not_promoted == "trained@final is not promoted: a person refused it."
    assert client.search_model_versions("name = 'asked'") == []
    capsys.readouterr()
    monkeypatch.setattr("sys.stdin", Terminal("approve\n"))
    approved = evaluation(fields, **gate)
    shown = capsys.readouterr().err
    nll = (f"{metrics['test/nll']:.6g}" for metrics in (approved.metrics, approved.baseline))
    assert "test/nll: trained@final {}, base {}".format(*nll) in shown
    assert "Register trained@final as a version of asked?" in shown
    assert (approved.not_promoted, approved.version) == ("", "1")
    tags = client.get_run(approved.mlflow_run_id).data.tags
    assert tags[APPROVAL_TAG] == "approve"
    assert REJECTED_TAG not in tags
    monkeypatch.setattr("sys.stdin", Terminal(""))
    assert "promote_if requires" in evaluation(fields, **gate | {"promote_if": "test/nll < 0.01"}).not_promoted
    with pytest.raises(ValidationError, match="it needs register_as"):
        evaluation(fields, needs_approval=True)


def test_the_terminal_shows_differences_and_why_the_checkpoint_was_registered(
    evaluated: EvaluateResult, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    show_evaluation(evaluated)
    shown = capsys.readouterr().out
    own, baseline = evaluated.metrics["test/nll"], evaluated.baseline["test/nll"]
    assert f"because test/nll is {own:.6g} < {baseline:.6g}, the baseline." in shown
    (line,) = (line for line in shown.splitlines() if line.startswith("│ test/nll "))
    low, high = (evaluated.differences[f"difference/test/nll_{end}"] for end in ("low", "high"))
    assert f"{own - baseline:+.3g} ({low:.3g} to {high:.3g})" in line
    assert "difference/" not in shown


def test_the_bounds_of_a_metric_have_no_difference(
    evaluated: EvaluateResult, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    metrics = {"test/pass_at_1": 0.5, "test/pass_at_1_low": 0.25, "test/pass_at_1_high": 0.75}
    differences = compare_scores([1.0, 0.0, 1.0, 1.0]).metrics("test/pass_at_1")
    assert "difference/test/pass_at_1_high" in differences
    show_evaluation(replace(evaluated, metrics=metrics, baseline=metrics, differences=differences))
    shown = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.splitlines() if "pass_at_1" in line]
    assert [row[-2:] for row in rows if row[0].endswith(("_low", "_high"))] == [["", ""]] * 2
    assert next(row for row in rows if row[0] == "test/pass_at_1")[-2].startswith("+0.75 (")


def test_metrics_are_in_mlflow_and_in_a_table(evaluated: EvaluateResult, mlflow_uri: str) -> None:
    client = MlflowClient(mlflow_uri)
    run = client.get_run(evaluated.mlflow_run_id)
    assert (run.info.run_name, run.info.status) == ("evaluated", "FINISHED")
    assert run.data.metrics["test/nll"] == evaluated.metrics["test/nll"]
    assert run.data.metrics["baseline/test/nll"] == evaluated.baseline["test/nll"]
    table = artifact("evaluation-evaluated")
    rows = {row["metric"]: row for row in table}
    assert rows["test/nll"] == {
        "metric": "test/nll",
        "trained@final": evaluated.metrics["test/nll"],
        "base": evaluated.baseline["test/nll"],
    }
    assert [artifact.path for artifact in client.list_artifacts(evaluated.mlflow_run_id)] == ["evaluation.json"]


class ChangingScore(SamplingClientEvaluator):
    """Stands for a sampled metric, which differs between two attempts."""

    score = 0.25

    async def __call__(self, sampling_client: object) -> dict[str, float]:
        return {"score": self.score}


@pytest.mark.usefixtures("trained")
def test_the_measurement_of_a_retry_counts(
    fields: dict[str, Any], mlflow_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables: list[object] = []

    def write(*args: object) -> None:
        tables.append(args)
        if len(tables) == 1:
            monkeypatch.setattr(ChangingScore, "score", 0.75)
            raise ConnectionError("The Prefect server is down.")

    monkeypatch.setattr("flows.evaluate.write_table", write)
    config = EvaluateConfig.model_validate(
        {key: fields[key] for key in PLACES[1:]}
        | {"run_name": "retried", "checkpoint": "base", "model": fields["model"]}
        | {"evaluators": [{"builder": f"{__name__}:ChangingScore"}], "promote_if": "score > 0.5"}
    )
    result = evaluate.with_options(retries=1, retry_delay_seconds=0)(config)
    assert (result.metrics["score"], result.not_promoted, len(tables)) == (0.75, "", 2)
    data = MlflowClient(mlflow_uri).get_run(result.mlflow_run_id).data
    assert data.metrics["score"] == 0.75
    assert "tinker_flows.not_promoted" not in data.tags


def test_promotion_gate(
    trained: TrainResult, evaluated: EvaluateResult, fields: dict[str, Any], mlflow_uri: str
) -> None:
    client = MlflowClient(mlflow_uri)
    (version,) = client.search_model_versions("name = 'evaluated'")
    assert (str(version.version), version.tags["tinker.state_path"]) == (evaluated.version, trained.state_path)
    assert str(client.get_model_version_by_alias("evaluated", "final").version) == evaluated.version

    gate = {"promote_if": "test/nll < 0.1 * baseline", "baseline": "trained@2", "register_as": "rejected"}
    rejected = evaluation(fields, run_name="rejected", **gate)
    assert "trained@final is not promoted: test/nll is " in rejected.not_promoted
    assert client.search_model_versions("name = 'rejected'") == []
    with get_client(sync_client=True) as prefect:
        state = prefect.read_flow_run(rejected.flow_run_id).state
    assert state is not None
    assert (state.name, state.message) == ("NotPromoted", rejected.not_promoted)


def test_sampler_weights_give_the_same_metrics(
    trained: TrainResult, evaluated: EvaluateResult, fields: dict[str, Any]
) -> None:
    alone = evaluation(
        fields, checkpoint=trained.sampler_path, model="tiny", run_name="sampler", evaluators=SAMPLED[:1]
    )
    assert alone.metrics == pytest.approx({key: evaluated.metrics[key] for key in alone.metrics}, abs=1e-4)


def test_comparison_metrics(compared: CompareResult, mlflow_uri: str) -> None:
    metrics = compared.metrics
    for name in ("checkpoint", "against"):
        assert metrics[f"kl_per_token/{name}"] > 0
        assert metrics[f"entropy_per_token/{name}"] > 0
        assert metrics[f"perplexity/{name}"] > 1
        assert 0 < metrics[f"distinct_1/{name}"] <= 1
        assert 1 <= metrics[f"vendi/{name}"] <= 2.0 + 1e-9
    assert metrics["perplexity/checkpoint"] < metrics["perplexity/against"], "it was trained on such answers"
    assert metrics["win_rate/checkpoint"] + metrics["win_rate/against"] == pytest.approx(1)
    difference = metrics["win_rate/checkpoint"] - metrics["win_rate/against"]
    assert metrics["difference/win_rate"] == pytest.approx(difference)
    assert 0 < metrics["difference/win_rate_p_value"] <= 1
    by_question: dict[str, tuple[list[str], list[str]]] = {}
    table = MlflowClient(mlflow_uri).download_artifacts(compared.mlflow_run_id, "samples.json")
    samples = json.loads(Path(table).read_text())
    assert samples["columns"] == ["question", "sample", "checkpoint", "against", "verdict"]
    for question, _, own, other, _ in samples["data"]:
        for texts, text in zip(by_question.setdefault(question, ([], [])), (own, other), strict=True):
            texts.append(text)
    own_P, others_P = zip(*([vendi(texts) for texts in pair] for pair in by_question.values()), strict=True)
    difference = metrics["vendi/checkpoint"] - metrics["vendi/against"]
    assert metrics["difference/vendi"] == pytest.approx(difference, abs=1e-9)
    bounds = [metrics[key] for key in ("difference/vendi_low", "difference/vendi_high") if key in metrics]
    interval = ttest_rel(own_P, others_P).confidence_interval(0.95) if own_P != others_P else ()
    assert bounds == pytest.approx([*interval]), "equal scores have no interval"
    for key in ("tokens", "entropy_per_token", "nll_per_token"):
        difference = metrics[f"{key}/checkpoint"] - metrics[f"{key}/against"]
        assert metrics[f"difference/{key}"] == pytest.approx(difference)
    assert metrics["perplexity/against"] == pytest.approx(math.exp(metrics["nll_per_token/against"]))
    assert (
        MlflowClient(mlflow_uri).get_run(compared.mlflow_run_id).data.metrics["vendi/against"]
        == metrics["vendi/against"]
    )
    rows = {row["metric"]: row for row in artifact("comparison-compared")}
    assert rows["perplexity"]["trained"] == metrics["perplexity/checkpoint"]
    assert rows["perplexity"]["base"] == metrics["perplexity/against"]
    names = [artifact.path for artifact in MlflowClient(mlflow_uri).list_artifacts(compared.mlflow_run_id)]
    assert sorted(names) == ["comparison.json", "samples.json"]


@pytest.mark.slow
def test_comparison_of_a_policy_with_itself(fields: dict[str, Any], trained: TrainResult) -> None:
    places = {key: fields[key] for key in PLACES}
    what = {"path": str(DATA / "gsm8k_test.jsonl"), "renderer_name": "qwen3_instruct", "limit": 2, "max_tokens": 8}
    same = {"run_name": "same", "checkpoint": "trained", "against": "trained@final"}
    metrics = compare(CompareConfig.model_validate({**places, **what, **same})).metrics
    for name in ("checkpoint", "against"):
        assert metrics[f"kl_per_token/{name}"] == pytest.approx(0, abs=1e-8)
        assert metrics[f"kl_per_answer/{name}"] == pytest.approx(0, abs=1e-4)
    assert metrics["perplexity/checkpoint"] == pytest.approx(metrics["perplexity/against"])


class LikesTheFirst(MessageCompleter):
    async def __call__(self, messages: list[Message]) -> Message:
        return Message(role="assistant", content="[[A]]")


def test_comparison_by_a_biased_judge_on_completions_of_one_word(fields: dict[str, Any], trained: TrainResult) -> None:
    """The bias is measured and cancels; there are no pairs of words of which a share could be distinct."""
    places = {key: fields[key] for key in PLACES}
    what = {"path": str(DATA / "gsm8k_test.jsonl"), "renderer_name": "qwen3_instruct", "limit": 2, "max_tokens": 1}
    own = {"run_name": "biased", "checkpoint": "trained", "judge": {"builder": f"{__name__}:LikesTheFirst"}}
    result = compare(CompareConfig.model_validate({**places, **what, **own}))
    assert (result.metrics["judge/position_bias"], result.metrics["judge/unparsed"]) == (1.0, 0.0)
    assert result.metrics["win_rate/checkpoint"] == 0.5
    assert ("judge/position_bias", 1.0, None) in result.rows
    assert not [key for key in result.metrics if key.startswith(("distinct_2", "distinct_3"))]
    assert [key for key in result.metrics if key.startswith("tokens")]


def test_several_checkpoints_are_one_chart_over_steps(
    trained: TrainResult, evaluated: EvaluateResult, fields: dict[str, Any], mlflow_uri: str
) -> None:
    result = evaluation(fields, run_name="curves", evaluators=SAMPLED, baseline="base", steps="all")
    assert result.by_step.keys() == {2}
    assert result.metrics == pytest.approx(evaluated.metrics, abs=1e-5)
    alone = evaluation(fields, run_name="second", evaluators=SAMPLED, checkpoint="trained@2")
    assert result.by_step[2] == pytest.approx(alone.metrics, abs=1e-5)
    assert history(result, "test/nll") == {2: alone.metrics["test/nll"], 3: result.metrics["test/nll"]}
    page = MlflowClient(mlflow_uri).download_artifacts(result.mlflow_run_id, "evaluation.html")
    charts = re.findall(r'<script type="application/json">(.*?)</script>', Path(page).read_text(), re.DOTALL)
    (nll,) = (
        json.loads(chart) for chart in charts if chart_values(chart) == pytest.approx(history(result, "test/nll"))
    )
    assert nll["data"][1]["name"] == "held-out data (baseline)"
    table = artifact("evaluation-curves")
    (row,) = [row for row in table if row["metric"] == "test/nll"]
    assert list(row) == ["metric", "step 2", "trained@final", "base"]


@pytest.mark.parametrize(
    ("usd", "stop", "num_sampled"),
    [
        (3, ("the evaluator tinker_flows:ExactMatch (evaluators.1) on base", 4), 4),
        (13, ("the evaluator tinker_flows:ExactMatch (evaluators.1) on trained@2", 16), 12),
        (16, ("the evaluator tinker_flows:ExactMatch (evaluators.0) on trained@final", 20), 16),
        (24, None, 24),
    ],
)
def test_an_evaluation_stops_within_its_budget(  # noqa: PLR0913 - three parameters and three fixtures
    trained: TrainResult,
    fields: dict[str, Any],
    tmp_path: Path,
    engine_url: str,
    usd: int,
    stop: tuple[str, int] | None,
    num_sampled: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A sampled token costs a dollar and the rest nothing: 2 problems with 2 answers of one token cost $4."""
    prices = tmp_path / "prices.json"
    prices.write_text(json.dumps([{"tinker_id": "tiny", "prefill": 0, "sample": 1e6, "train": 0}]))
    params = {"path": str(DATA / "gsm8k_test.jsonl"), **SHORT, "sampling": {"max_tokens": 1, "num_samples": 2}}
    evaluators = [
        {"builder": "tinker_flows:ExactMatch", "params": {**params, "name": name}} for name in ("first", "second")
    ]
    name, budget = f"spent-{usd}", {"usd": usd, "prices": str(prices)}
    gate = {"promote_if": "test/first >= 0", "register_as": name}
    before = engine_tokens(engine_url)
    changes = {"run_name": name, "evaluators": evaluators, "baseline": "base", "steps": "all", "data": None}
    result = evaluation(fields, **changes, **gate, budget=budget)
    assert engine_tokens(engine_url)["sampled"] - before["sampled"] == num_sampled
    assert result.cost["cost/usd"] == result.cost["cost/num_sample_tokens"] == num_sampled

    measured = [f"test/{key}" for key in ("first", "second") if f"test/{key}" in result.baseline]
    measured += [f"2/test/{key}" for key in ("first", "second") if f"test/{key}" in result.by_step.get(2, {})]
    measured += [f"final/test/{key}" for key in ("first", "second") if f"test/{key}" in result.metrics]
    order = [f"{weights}test/{key}" for weights in ("", "2/", "final/") for key in ("first", "second")]
    assert measured == order[: num_sampled // 4]

    client = MlflowClient(result.tracking_uri)
    run = client.get_run(result.mlflow_run_id)
    with get_client(sync_client=True) as prefect:
        state = prefect.read_flow_run(UUID(result.flow_run_id)).state
    assert state is not None
    if stop is None:
        assert (result.stopped, result.not_promoted, result.version, state.name) == ("", "", "1", "Completed")
        return
    where, cost = stop
    assert result.stopped == (
        f"The evaluation stopped before {where}: it would have cost ${cost} with this part, but budget.usd is {usd}; "
        "raise the budget and start it again."
    )
    assert (run.info.status, run.data.tags["tinker_flows.stopped"]) == ("FINISHED", result.stopped)
    assert (state.name, state.message) == ("BudgetSpent", result.stopped)
    assert result.not_promoted == "trained@final is not promoted: the budget stopped its evaluation."
    assert client.search_model_versions(f"name = '{name}'") == []
    show_evaluation(result)
    assert result.stopped in " ".join(capsys.readouterr().out.split())
    if result.by_step:
        page = client.download_artifacts(result.mlflow_run_id, "evaluation.html", str(tmp_path))
        assert result.stopped in Path(page).read_text()


def test_a_budget_below_the_first_evaluator_is_an_error(
    trained: TrainResult, fields: dict[str, Any], tmp_path: Path
) -> None:
    """The tokens of held-out data are known in advance, for weights with a training client and for those without."""
    prices = tmp_path / "prices.json"
    prices.write_text(json.dumps([{"tinker_id": "tiny", "prefill": 1e6, "sample": 1e6, "train": 1e6}]))
    costs: dict[str, float] = {}
    for checkpoint in ("trained@final", trained.sampler_path):
        changes = {"checkpoint": checkpoint, "model": "tiny"}
        cost = evaluation(fields, **changes, budget={"prices": str(prices)}).cost["cost/usd"]
        expected = (
            rf"^Nothing was measured: the evaluation would have cost \${cost:g} with its first part, the held-out data"
        )
        with pytest.raises(ConfigError, match=expected):
            evaluation(fields, **changes, budget={"usd": cost - 0.5, "prices": str(prices)})
        enough = evaluation(fields, **changes, budget={"usd": cost, "prices": str(prices)})
        assert enough.stopped == ""
        costs[checkpoint] = cost
    assert len(set(costs.values())) == 2, "a sampler also reads the last target, and returns a token"
    with pytest.raises(ConfigError, match=r"would have taken .* hours with its first part.* budget\.hours is 1e-09;"):
        evaluation(fields, budget={"hours": 1e-9})


def chart_values(chart: str) -> dict[int, float]:
    line = json.loads(chart)["data"][0]
    return dict(zip(line["x"], line["y"], strict=True))


class NeedsTraining(TrainingClientEvaluator):
    pass


def test_invalid_evaluations(trained: TrainResult, fields: dict[str, Any]) -> None:
    needs = [{"builder": f"{__name__}:NeedsTraining"}]
    for changes, expected in (
        (
            {"checkpoint": "nobody@best"},
            "The checkpoint 'nobody@best' does not exist: the run 'nobody' has no checkpoint in",
        ),
        ({"checkpoint": "base", "register_as": "x", "model": "tiny"}, "register_as needs a checkpoint"),
        ({"data": None}, "has no data and no evaluators"),
        ({"steps": "1"}, r"The checkpoint 'trained@1' does not exist: .* it has checkpoints at 2, 3"),
        ({"checkpoint": "base", "steps": "all", "model": "tiny"}, "steps needs the checkpoint of a run"),
        ({"checkpoint": trained.sampler_path, "model": "tiny", "evaluators": needs}, "needs a training client"),
    ):
        with pytest.raises(ConfigError, match=expected):
            evaluation(fields, **changes)
    with pytest.raises(ValidationError, match="it needs a baseline"):
        evaluation(fields, promote_if="test/nll < baseline")


@dataclass(frozen=True, kw_only=True)
class Fixed(SampledEvaluator):
    """Evaluator whose first policy has no right answer, and whose second has `num_right`."""

    num_right: int
    num_calls: list[int] = field(default_factory=list, init=False)

    def question(self, row: Mapping[str, str]) -> str:
        return row["question"]

    async def grade(self, answer: Answer, row: Mapping[str, str]) -> Graded:
        self.num_calls.append(0)
        index = len(self.num_calls) - 1 - len(self.rows)
        return Graded(0 <= index < self.num_right, False)


def test_promotion_needs_a_difference_that_is_not_chance(
    trained: TrainResult, fields: dict[str, Any], mlflow_uri: str
) -> None:
    """With 8 problems, 5 better answers are significant (1 / 32), and 4 are not (1 / 16)."""
    params = {"path": str(DATA / "gsm8k_test.jsonl"), "renderer_name": "qwen3_instruct", "name": "fixed", "limit": 8}
    params["sampling"] = {"max_tokens": 1}
    gate = {"baseline": "base", "promote_if": "test/fixed > baseline", "promote_confidence": 0.95, "data": None}

    def run(num_right: int) -> EvaluateResult:
        evaluators = [{"builder": f"{__name__}:Fixed", "params": params | {"num_right": num_right}}]
        return evaluation(fields, run_name=f"fixed-{num_right}", evaluators=evaluators, **gate)

    good, doubtful = run(5), run(4)
    assert good.not_promoted == ""
    assert good.differences["difference/test/fixed"] == pytest.approx(5 / 8)
    assert good.differences["difference/test/fixed_p_value"] == pytest.approx(2 / 32)
    logged = MlflowClient(mlflow_uri).get_run(good.mlflow_run_id).data.metrics
    assert good.differences.items() <= logged.items()
    assert "by 0.5 on 8 problems, which happens by chance with a probability of 0.0625" in doubtful.not_promoted


def test_a_run_is_promoted_only_for_a_difference_that_is_not_chance(
    prefect_server: str, fields: dict[str, Any], mlflow_uri: str
) -> None:
    """The run compares its last evaluation with its first, and its report has the interval over the problems."""
    params = {"path": str(DATA / "gsm8k_test.jsonl"), "renderer_name": "qwen3_instruct", "name": "fixed", "limit": 8}
    params["sampling"] = {"max_tokens": 1}
    gate = {"register_as": "graded", "promote_if": "test/fixed > baseline", "promote_confidence": 0.95}

    def run(num_right: int, **other: Any) -> TrainResult:
        evaluators = [{"builder": f"{__name__}:Fixed", "params": params | {"num_right": num_right}}]
        changes = {"run_name": f"graded-{num_right}", "evaluators": evaluators, "num_steps": 2, "eval_every": 2, **gate}
        return sft(SftConfig.model_validate(fields | changes | other))

    good, doubtful = run(5), run(4)
    assert good.not_promoted == ""
    assert "by 0.5 on 8 problems, which happens by chance with a probability of 0.0625" in doubtful.not_promoted
    tags = MlflowClient(mlflow_uri).get_run(good.mlflow_run_id).data.tags
    assert "minus that of the baseline is 0.625 (95 % interval" in tags["tinker_flows.promotion.difference"]
    best = {
        "keep_best": {"metric": "test/fixed", "mode": "max"},
        "keep_last": 1,
        "checkpoint_every": 1,
        "eval_every": 1,
    }
    selected = run(5, run_name="graded-best", num_steps=4, **best)
    assert selected.not_promoted.startswith("The checkpoint at step 1 is not promoted: ")
    assert "0.125 (0.0312 times the 4 checkpoints that keep_best compared)" in selected.not_promoted
    (row,) = [row for row in good.held_out if row.metric == "fixed"]
    low, high = ttest_1samp([1.0] * 5 + [0.0] * 3, 0).confidence_interval(0.95)
    assert row.change.value == 5 / 8
    assert row.change.half_width == pytest.approx((high - low) / 2)
    scored = "test/nll or test/nll_per_token or test/bits_per_byte or test/fixed"
    with pytest.raises(ConfigError, match=f"names test/own_score: use {scored}, or remove"):
        sft(
            SftConfig.model_validate(
                fields
                | {
                    "run_name": "unscored",
                    **gate,
                    "promote_if": "test/own_score < baseline",
                    "evaluators": [{"builder": f"{__name__}:Fixed", "params": params | {"num_right": 1}}],
                }
            )
        )


def test_held_out_data_has_a_paired_difference_and_can_be_a_gate(
    trained: TrainResult, fields: dict[str, Any], mlflow_uri: str
) -> None:
    gate = {"register_as": "by-nll", "promote_if": "test/nll < baseline", "promote_confidence": 0.95}
    result = evaluation(fields, run_name="nll", baseline="base", **gate)
    for name in ("test/nll", "test/nll_per_token", "test/bits_per_byte"):
        change = result.metrics[name] - result.baseline[name]
        assert result.differences[f"difference/{name}"] == pytest.approx(change, abs=1e-5)
        assert result.differences[f"difference/{name}_low"] < change < result.differences[f"difference/{name}_high"]
    # The run trains for three steps on other questions; either outcome is one of the test, not of a missing score.
    assert bool(result.version) != ("happens by chance" in result.not_promoted or "requires <" in result.not_promoted)


def test_a_confidence_without_scores_is_refused(trained: TrainResult, fields: dict[str, Any]) -> None:
    gate = {"baseline": "base", "promote_confidence": 0.95}
    for condition in (None, "test/exact_match > 0.5", "test/exact_match > 1.1 * baseline"):
        with pytest.raises(ValidationError, match="promote_confidence requires a condition such as"):
            evaluation(fields, **gate, promote_if=condition)
    with pytest.raises(ConfigError, match=r"promote_if names test/own_score: use test/exact_match or"):
        evaluation(fields, **gate, promote_if="test/own_score < baseline", evaluators=SAMPLED)


class Builder:
    """Evaluator builder like those of tinker-cookbook: called to build the evaluator."""

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def __call__(self) -> SamplingClientEvaluator:
        return SamplingClientEvaluator()


def test_evaluators_from_classes_and_builders(tmp_path: Path) -> None:
    assert isinstance(build_evaluator(f"{__name__}:Builder", {"limit": 3}), SamplingClientEvaluator)
    params = {"path": str(tmp_path / "none.jsonl"), "renderer_name": "x"}
    for wrong, expected in (
        (params, "none.jsonl could not be read"),
        ({**params, "pass_at": [2]}, "pass_at has 2, but num_samples is 1"),
        ({**params, "limits": 1}, "could not be built"),
    ):
        with pytest.raises(ConfigError, match=expected):
            build_evaluator("tasks.evaluation.sampled:ExactMatch", wrong)
