"""Summary of a run: verdict, facts, warnings, and the held-out data before and after."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from mlflow.entities import Dataset, DatasetInput, Param, Run, RunData, RunInfo, RunInputs, RunStatus, RunTag
from scipy.stats import binomtest, ttest_rel

from blocks.storage import RunDirectory, RunStorage
from flows.config.loader import load_config
from flows.config.train import SftConfig
from flows.runs.start.config_record import check_config
from objectives.term_weights.targets import TargetSpec
from tasks.reports.run_report import describe_effects
from tasks.reports.summary import RunSummary, run_warnings, summarize
from tasks.reports.tables import (
    Control,
    Estimate,
    History,
    format_row,
    held_out_rows,
    held_out_table,
    recent_term_rows,
    target_rows,
)
from tasks.training.held_out import BatchValues

HISTORY = {
    "test/nll": [(0, 1.5482), (12, 1.103), (24, 1.0611)],
    "test/term/logic/value": [(0, 0.0765), (24, 0.0741)],
    "test/term/logic/stderr": [(0, 0.0253), (24, 0.0244)],
    "cost/hours": [(23, 0.5)],
    "cost/num_train_tokens": [(23, 1234.0)],
}


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return RunStorage(url=str(tmp_path)).run_directory("mine")


def record(directory: RunDirectory, step: int, *, final: bool) -> None:
    line = {"name": f"{step:06}", "batch": step, "epoch": 0, "final": final, "state_path": f"tinker://a/weights/{step}"}
    directory.append_line("checkpoints.jsonl", json.dumps(line))


def summary(
    directory: RunDirectory,
    history: History = HISTORY,
    datasets: Sequence[Dataset] = (),
    limits: Mapping[str, int] = MappingProxyType({}),
    **tags: str,
) -> RunSummary:
    params = {"model": "tiny", "learning_rate": "0.001", "lr_schedule": "linear", "data.builder": "a:B"}
    params |= {limit: str(value) for limit, value in limits.items()}
    data = RunData(
        params=[Param(key, value) for key, value in params.items()],
        tags=[RunTag(key.replace("__", "."), value) for key, value in (tags | {"prefect__flow_name": "sft"}).items()],
    )
    info = RunInfo("id", "1", "user", RunStatus.to_string(RunStatus.FINISHED), 0, 1, "active")
    inputs = RunInputs([DatasetInput(dataset) for dataset in datasets])
    return summarize("mine", Run(info, data, inputs), directory, history)


def test_finished_run(directory: RunDirectory, tmp_path: Path) -> None:
    with directory:
        record(directory, 12, final=False)
        record(directory, 24, final=True)
    result = summary(directory)
    assert result.verdict == "No warning; nll on held-out data went from 1.548 to 1.061."
    facts = dict(result.facts)
    assert (facts["time"], facts["tokens"], facts["cost"]) == (
        "30.0 min",
        "1,234 tokens in passes",
        "price unknown",
    )
    assert facts["learning rate"] == "0.001, linear"
    assert (facts["method"], facts["data"], facts["steps"]) == ("sft", "a:B", "24")
    assert result.weights == "tinker://a/weights/24"
    assert result.commands[0] == ("Sample", f'tinker-flows sample mine@final "PROMPT" --storage {tmp_path}')
    assert [row.metric for row in result.headlines] == ["nll"]


def test_the_commands_leave_out_the_term_with_the_largest_share(directory: RunDirectory) -> None:
    shares = {"base": 0.5, "logic": 0.1, "topology": 0.4, "watched": 0.0, "limited": 0.6, "a-x40-1": 0.7}
    history = {f"term/{name}/grad_share": [(0, share)] for name, share in shares.items()}
    history |= {f"term/{name}/weight": [(0, float(name != "watched"))] for name in shares}
    history["term/limited/multiplier"] = [(0, 1.0)]
    with directory:
        record(directory, 24, final=True)
    commands = dict(summary(directory, history).commands)
    assert (
        " objective.regularizers.topology.weight=0 " in commands["See what topology did: train without it and compare"]
    )


@pytest.mark.parametrize(
    ("limits", "raised"),
    [
        ({}, "num_epochs=MORE"),
        ({"num_epochs": 2}, "num_epochs=MORE"),
        ({"num_steps": 24, "num_epochs": 3}, "num_steps=MORE"),
        ({"num_steps": 99, "num_epochs": 2}, "num_epochs=MORE"),
        ({"num_steps": 24, "num_epochs": 2}, "num_steps=MORE num_epochs=MORE"),
    ],
)
def test_the_fork_raises_the_limit_at_which_the_run_ended(
    limits: dict[str, int], raised: str, directory: RunDirectory
) -> None:
    line = {"name": "final", "batch": 0, "epoch": 2, "step": 24, "final": True, "state_path": "tinker://a/weights/24"}
    with directory:
        directory.append_line("checkpoints.jsonl", json.dumps(line))
    fork = dict(summary(directory, limits=limits).commands)["Continue with more steps (fork)"]
    assert fork.endswith(f" resume=mine@final {raised}")


@pytest.mark.parametrize(
    ("fields", "parent"),
    [
        ({}, {}),
        ({"resume": "run@8", "num_steps": 12}, {"resume": "run@8", "run_name": "run", "step": 8}),
        ({"init_from": "tinker://a/weights/8"}, {"init_from": "tinker://a/weights/8"}),
    ],
)
def test_the_commands_start_from_the_recorded_config(
    fields: dict[str, Any], parent: dict[str, Any], tmp_path: Path
) -> None:
    """Overrides of the run, text that YAML reads differently, and the origin are those of the run itself."""
    builder = {"builder": "a:B", "params": {"rate": 1e-05, "prompt": "\U0001f600"}}
    terms = {"regularizers": [{"name": "kl", "weight": 0.1}, {"name": "logic", "weight": 2.0}]}
    base = {
        "run_name": "mine",
        "model": "tiny",
        "data": builder,
        "objective": terms,
        "storage": str(tmp_path / "my runs"),
    }
    config = SftConfig.model_validate(base | {"mlflow_tags": {"team": "a", "tinker_flows.sweep": "s"}} | fields)
    with RunStorage(url=config.storage).run_directory("mine") as directory:
        check_config(directory, config, None, [])
        if parent:
            line = {"name": "fork", "batch": 8, "epoch": 0, "state_path": "tinker://a/weights/8", "parent": parent}
            directory.append_line("checkpoints.jsonl", json.dumps(line))
        record(directory, 12, final=True)
    history = {"term/logic/grad_share": [(0, 0.5)], "term/logic/weight": [(0, 2.0)]}
    commands = dict(summary(directory, history).commands)

    def loaded(purpose: str) -> SftConfig:
        words = shlex.split(commands[purpose].partition(" && ")[0].replace("MORE", "99"))
        assert words[:4] == ["tinker-flows", "run", "sft", "--config"]
        return load_config(SftConfig, words[4], words[5:])

    without = loaded("See what logic did: train without it and compare")
    terms["regularizers"][1]["weight"] = 0
    expected = SftConfig.model_validate(base | {"mlflow_tags": {"team": "a"}, "run_name": "NEW"} | fields)
    assert without == expected
    update: dict[str, Any] = {"resume": "mine@final", "init_from": "base", "num_epochs": 99}
    assert loaded("Continue with more steps (fork)").model_dump().items() >= update.items()
    update = {"resume": "auto", "init_from": "mine@final", "num_steps": config.num_steps}
    assert loaded("Train on with a new optimizer").model_dump().items() >= update.items()


@pytest.mark.parametrize(
    ("field", "step", "facts"),
    [
        ("resume", 8, {"starts from": "a@8", "steps": "24 (16 in this run)", "data": "a:B, batch of step 8 0a1b"}),
        (
            "init_from",
            0,
            {"starts from": "a@8, with a new optimizer", "steps": "24", "data": "a:B, first batch 0a1b"},
        ),
    ],
)
def test_the_facts_name_the_origin(field: str, step: int, facts: dict[str, str], directory: RunDirectory) -> None:
    """The batch that the digest identifies is that of the first step of a fork, which its parent's digest is not."""
    parent = {field: "a@best", "run_name": "a", "step": 8}
    line = {"name": "fork", "batch": step, "epoch": 0, "state_path": "tinker://a/weights/8", "parent": parent}
    with directory:
        directory.append_line("checkpoints.jsonl", json.dumps(line))
        record(directory, 24, final=True)
    datasets = [Dataset("a:B", "0a1b", "code", ""), Dataset("rows.jsonl", "2c3d", "local", "")]
    shown = dict(summary(directory, datasets=datasets, tinker_flows__first_batch="0a1b").facts)
    assert shown.items() >= facts.items()
    batch = "digest of the batch of step 8" if step else "digest"
    assert shown["lineage"] == f"a:B ({batch} 0a1b), rows.jsonl (digest 2c3d) → checkpoint 000024 at step 24"


def test_stopped_run_with_warnings(directory: RunDirectory) -> None:
    with directory:
        record(directory, 12, final=False)
    tags = {"tinker_flows__warning.conflict.base.logic": "They conflict.", "tinker_flows__skipped.x": "Step 3: no."}
    result = summary(directory, tinker_flows__stopped="The budget is spent.", **tags)
    assert result.verdict.startswith("The budget is spent. 2 warnings; nll on held-out data")
    assert result.warnings == ("They conflict.", "An evaluation was skipped. Step 3: no.")
    assert [purpose for purpose, _ in result.commands] == ["Resume"]


BEFORE, AFTER, WITHOUT = ([0.1, 0.053, 0.07], [0.09, 0.0582, 0.05], [0.1, 0.051, 0.08])


def half_width(values: Sequence[float], others: Sequence[float]) -> float:
    """Return half of scipy's interval of a paired t-test."""
    interval = ttest_rel(values, others).confidence_interval(0.95)
    return float(interval.high - interval.low) / 2


def test_held_out_terms_are_compared_over_paired_batches() -> None:
    batches = {step: {"logic": BatchValues(values, [2] * 3)} for step, values in ((0, BEFORE), (24, AFTER))}
    nll, logic = held_out_rows(HISTORY, batches)
    assert (nll.metric, logic.metric) == ("nll", "logic")
    assert nll.change.value == pytest.approx(1.0611 - 1.5482)
    assert np.isnan(nll.change.half_width)
    assert logic.after.value == pytest.approx(np.mean(AFTER))
    assert logic.after.half_width == pytest.approx(half_width(AFTER, [0.0] * 3))
    assert logic.change.value == pytest.approx(np.mean(AFTER) - np.mean(BEFORE))
    assert logic.change.half_width == pytest.approx(half_width(AFTER, BEFORE))
    control = BatchValues(WITHOUT, [2] * 3)
    effect = logic.compare(Control(Estimate.of(control), control))
    assert effect.half_width == pytest.approx(half_width(AFTER, WITHOUT))
    other_data = logic.compare(Control(Estimate(0.05), BatchValues([0.05], [6])))
    assert other_data.value == pytest.approx(np.mean(AFTER) - 0.05)
    assert np.isnan(other_data.half_width)


def test_interval_of_a_share_never_claims_certainty() -> None:
    """It is scipy's interval of a share, but for the quantile; equal values of other metrics have no interval."""
    history = {f"test/{name}": [(0, 0.0), (4, 1.0)] for name in ("accuracy", "margin")}
    batches = {
        step: {
            "test/accuracy": BatchValues([value] * 64, [1] * 64),
            "test/margin": BatchValues([3 * value] * 64, [1] * 64),
        }
        for step, value in ((0, 0.0), (4, 1.0))
    }
    accuracy, margin = held_out_rows(history, batches)
    assert accuracy.after.bounds
    assert accuracy.before.bounds
    expected = binomtest(64, 64).proportion_ci(method="wilson")
    assert accuracy.after.bounds == pytest.approx((expected.low, 1.0), abs=0.005)
    assert accuracy.before.bounds == pytest.approx((0.0, 1 - expected.low), abs=0.005)
    assert (str(accuracy.before), str(accuracy.after)) == ("0 (0 to 0.059)", "1 (0.94 to 1)")
    assert (str(margin.before), str(margin.after), margin.change.signed()) == ("0", "3", "+3")
    assert accuracy.change.signed() == "+1"
    assert "0 ± " not in str(held_out_table([accuracy, margin]))


@pytest.mark.parametrize("num", [5, 12, 200])
@pytest.mark.parametrize("value", [3.0, 0.1])
def test_equal_values_have_no_interval_whatever_their_number(num: int, value: float) -> None:
    assert str(Estimate.of(BatchValues([value] * num, [1] * num))) == f"{value:g}"


@pytest.mark.parametrize("num", [5, 12, 17, 200])
def test_a_target_with_equal_values_has_no_interval(num: int) -> None:
    history = {"term/a/value": [(step, 0.1) for step in range(4 * num)], "term/a/multiplier": [(0, 1.0)]}
    (row,) = target_rows(history, {"a": TargetSpec(at_most=0.2)})
    assert np.isnan(row.half_width)


@pytest.mark.parametrize("num_right", [0, 1, 9990, 9999, 10_000])
def test_printed_interval_of_a_share_contains_its_value(num_right: int) -> None:
    scores = [1.0] * num_right + [0.0] * (10_000 - num_right)
    estimate = Estimate.of(BatchValues(scores, [1] * len(scores)), is_share=True)
    value, low, high = (float(number) for number in re.findall(r"[0-9.e-]+", str(estimate)))
    assert low <= value <= high
    assert low < high
    assert estimate.bounds
    assert (value == 1, low == 1, high == 1) == (num_right == 10_000, False, estimate.bounds.high == 1)
    assert estimate.errors
    assert min(estimate.errors) >= 0


def test_wilsons_interval_is_chosen_by_the_metric() -> None:
    """The batches of a term may all be 0 or 1; an accuracy may be 0 at every evaluation."""
    history = {
        key: [(0, 0.0), (4, 0.0)] for key in ("test/accuracy", "test/m", "test/m_truncated", "test/term/logic/value")
    }
    batches = {
        step: {
            "test/accuracy": BatchValues([0.0] * 9, [1] * 9),
            "test/m": BatchValues([0.0] * 9, [1] * 9),
            "logic": BatchValues([0.0, 1.0], [64, 1]),
        }
        for step in (0, 4)
    }
    rows = {row.metric: row for row in held_out_rows(history, batches)}
    assert rows["logic"].after.bounds is None
    assert rows["accuracy"].after.bounds
    assert rows["m"].before.bounds


def test_interval_of_a_weighted_share_contains_its_value() -> None:
    estimate = Estimate.of(BatchValues([0.0, 1.0], [64, 1]), is_share=True)
    assert estimate.bounds
    assert estimate.bounds.low <= estimate.value <= estimate.bounds.high


def test_scaled_accuracies_of_earlier_versions_keep_their_interval() -> None:
    estimate = Estimate.of(BatchValues([200 / 237, 400 / 237], [1, 1]), is_share=True)
    assert estimate.bounds is None
    assert estimate.has_interval


def test_ties_are_named_at_the_first_and_the_last_evaluation_of_single_pairs() -> None:
    history = {"test/accuracy": [(0, 0.25), (4, 1.0)]}
    margins = BatchValues([0.0] + [1.0] * 149, [1] * 150)
    (accuracy,) = held_out_rows(history, {step: {"test/margin": margins} for step in range(5)})
    assert "rounding: <1% of the pairs at step 0, <1% of the pairs at step 4. They" in accuracy.note
    (accuracy,) = held_out_rows(history, {0: {"test/margin": BatchValues([0.0, 1.0], [2, 1])}})
    assert accuracy.note == ""
    scaled = {name: BatchValues([0.0, 4 / 3], [1, 1]) for name in ("test/accuracy", "test/margin")}
    (accuracy,) = held_out_rows(history, {0: scaled})
    assert accuracy.note == ""


def test_ties_are_explained() -> None:
    history = {"test/accuracy": [(0, 0.25), (4, 1.0)], "test/margin": [(0, 0.1), (4, 2.0)]}
    values = {0: [0.0, 1e-8, -1e-8, 0.4], 4: [2.0, 2.0, 2.5, 1.5]}
    batches = {step: {"test/margin": BatchValues(margins, [1] * 4)} for step, margins in values.items()}
    accuracy, margin = held_out_rows(history, batches)
    assert accuracy.note == (
        "Ties in the accuracy, with a margin of 0 up to rounding: 75% of the pairs at step 0. They count as wrong, "
        "except where rounding makes them right."
    )
    assert margin.note == ""
    (accuracy, _) = held_out_rows(history, {4: batches[4]})
    assert accuracy.note == ""


def test_effects_are_one_sentence() -> None:
    names = ("nll", "logic", "topology", "confidence")
    changes = dict(
        zip(names, ([0.3, 0.31, 0.29], [-0.2, -0.21, -0.19], [-0.1, -0.11, -0.09], [0.1, -0.1, 0.05]), strict=True)
    )
    keys = {name: "test/nll" if name == "nll" else name for name in names}
    history = {key if key == "test/nll" else f"test/term/{key}/value": [(4, 1.0)] for key in keys.values()}
    rows = held_out_rows(history, {4: {keys[name]: BatchValues(values, [1] * 3) for name, values in changes.items()}})
    none = BatchValues([0.0] * 3, [1] * 3)
    sentence = describe_effects(rows, {name: Control(Estimate(0.0), none) for name in names})
    assert sentence == (
        "Compared with a control without the terms, the terms raised nll by 0.300 ± 0.025, lowered logic by 0.200 ± "
        "0.025 and topology by 0.100 ± 0.025, and did not measurably change confidence."
    )
    assert describe_effects(rows, {}) == ""


def test_a_control_adds_two_columns() -> None:
    rows = held_out_rows(HISTORY, {})
    columns, cells = held_out_table(rows)
    assert columns == ["held-out data", "before (step 0)", "after (step 24)", "change"]
    assert cells == [["nll", "1.548", "1.061", "-0.4871"], ["logic", "0.0765", "0.0741", "-0.0024"]]
    columns, cells = held_out_table(rows, {"logic": Control(Estimate(0.0755))})
    assert columns[3:] == ["without the terms", "effect of the terms"]
    assert [line[3:] for line in cells] == [["", ""], ["0.0755", "-0.0014"]]


def test_terms_have_means_over_the_last_quarter_of_the_steps() -> None:
    values = [9.0, 9.0, 9.0, 9.0, 9.0, 9.0, 1.0, 3.0]
    history = {
        "term/logic/weight": [(step, 2.0) for step in range(8)],
        "term/logic/value": list(enumerate(values)),
        "term/logic/grad_share": [(6, 0.0), (7, 0.4)],
        "term/logic/contribution": [(6, 1.0), (7, 3.0)],  # the loss of these four steps has 4 / 4 from this term
        "term/logic/cosine_to_base": [(6, 0.0), (7, -0.5)],  # without a gradient at step 6
        "term/base/weight": [(0, 1.0)],
    }
    title, (base, logic) = recent_term_rows(history)
    assert title == "terms, means over the last 4 steps"
    assert format_row(logic) == ("logic", "5.5", "2", "1", "10.0%", "-0.500")
    assert format_row(base) == ("base", "-", "1", "-", "-", "-")


def test_a_metric_of_another_step_than_its_column_names_its_step() -> None:
    rows = held_out_rows({"test/nll": [(0, 2.0), (24, 1.0)], "test/rare": [(0, 0.5)]}, {})
    assert held_out_table(rows)[1] == [["nll", "2", "1", "-1"], ["rare", "0.5", "0.5 (step 0)", ""]]


def test_skipped_terms_are_warnings() -> None:
    history = {"term/logic/skipped": [(step, 1.0) for step in range(3, 10)]}
    assert run_warnings({}, history) == ("Term logic was skipped at 7 steps (3, 4, 5, 6, 7, ...).",)


def test_the_main_metric_comes_first() -> None:
    rows = held_out_rows(HISTORY | {"test/bits_per_byte": [(0, 1.0)]}, {})
    assert [row.metric for row in rows] == ["nll", "bits_per_byte", "logic"]
