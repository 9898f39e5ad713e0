"""Plan of a sweep: space, ablations, validation, search, pruning and the order of trials."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError
from sft_config import sft_fields

from blocks.errors import ConfigError
from blocks.files.local_directory import LocalDirectory
from flows.config.loader import load_config
from flows.sweeps.ablation import subsets
from flows.sweeps.config import PruneConfig, SearchConfig, SweepConfig
from flows.sweeps.plan import SweepPlan, make_plan
from flows.sweeps.pruning import Pruner
from flows.sweeps.record import CONFIG_NAME, check_sweep
from flows.sweeps.scheduler import Schedule
from flows.sweeps.search import TriedPoint, next_point
from flows.sweeps.space import dimensions_of
from tasks.sweeps.store import Trial, read_trials

WEIGHT = "objective.regularizers.{}.weight"


def plan(tmp_path: Path, **fields: Any) -> SweepPlan:
    base = sft_fields(tmp_path, "base", f"sqlite:///{tmp_path}/mlflow.db")
    return make_plan(SweepConfig.model_validate({"run_name": "s", "base": base, **fields}))


def rejection(tmp_path: Path, **fields: Any) -> str:
    with pytest.raises(ConfigError) as error:
        plan(tmp_path, **fields)
    message = str(error.value)
    assert "\n" not in message
    return message


def test_grid_contains_every_combination(tmp_path: Path) -> None:
    sweep = plan(tmp_path, space={"learning_rate": [1e-3, 1e-2], WEIGHT.format("logic"): [0.5, 1.0, 2.0]})
    assert [dict(values) for values in sweep.grid] == [
        {"learning_rate": rate, WEIGHT.format("logic"): weight} for rate in (1e-3, 1e-2) for weight in (0.5, 1.0, 2.0)
    ]
    config = sweep.config_of(sweep.grid[3], "s-004-s7", 7)
    assert (config.run_name, config.seed, config.learning_rate) == ("s-004-s7", 7, 1e-2)
    assert weights_of(sweep, sweep.grid[3])["logic"] == 0.5
    # The base is unchanged.
    assert sweep.base["learning_rate"] == 1e-2
    assert sweep.base["objective"]["regularizers"][1]["weight"] == 2.0


def test_sweep_of_a_release_without_some_fields_resumes(tmp_path: Path) -> None:
    directory = LocalDirectory(tmp_path / "s")
    recorded = tmp_path / "s" / CONFIG_NAME
    space = {"learning_rate": [1e-3, 1e-2]}
    check_sweep(directory, plan(tmp_path, space=space))
    fields = json.loads(recorded.read_text())
    for key in ("ablation", "measure_ablated", "weight_factors"):
        del fields[key]
    recorded.write_text(json.dumps(fields))

    check_sweep(directory, plan(tmp_path, space=space))
    with pytest.raises(ConfigError, match="was started with another ablation, space: restore it"):
        check_sweep(directory, plan(tmp_path, space={"lora_rank": [4, 8]}, ablation="one_at_a_time"))

    recorded.write_text(recorded.read_text()[:20])
    with pytest.raises(ConfigError, match=rf"{CONFIG_NAME} is not the config of a sweep: restore it"):
        check_sweep(directory, plan(tmp_path, space=space))


def test_points_without_any_layer_are_refused_before_the_first_trial(tmp_path: Path) -> None:
    layers = ("train_attn", "train_mlp", "train_unembed")
    message = rejection(tmp_path, space={layer: [True, False] for layer in layers})
    assert "train_attn, train_mlp and train_unembed are all false" in message


def test_list_entries_are_addressed_by_index_and_values_may_be_schedules(tmp_path: Path) -> None:
    schedule = {"schedule": "linear", "start": 0.0, "end": 1.0}
    sweep = plan(tmp_path, space={"objective.regularizers.0.weight": [1.0, schedule]})
    config = sweep.config_of(sweep.grid[1], "x", 0)
    assert config.objective.regularizers[0].weight.model_dump() == schedule  # type: ignore[union-attr]


def test_exponents_that_yaml_reads_as_text_are_numbers(tmp_path: Path) -> None:
    fields = yaml.safe_load("{learning_rate: [1e-4, 1.5e2], adam.beta1: {low: 1e-1, high: 0.9, num: 2}}")
    assert [type(value) for value in fields["learning_rate"]] == [str, str]
    sweep = plan(tmp_path, space=fields)
    assert [tuple(point.values()) for point in sweep.grid] == [(1e-4, 0.1), (1e-4, 0.9), (150.0, 0.1), (150.0, 0.9)]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"space": {"learning_rat": [1.0]}}, "the field 'learning_rat' is unknown"),
        (
            {"space": {WEIGHT.format("ethics"): [1.0]}},
            "'ethics', which is not in the list; the entries are topology, logic, confidence",
        ),
        ({"space": {"learning_rate": [1e-3, -1]}}, "at learning_rate=-1"),
        ({"space": {"learning_rate": {"low": -1, "high": 1.0}}, "search": {"method": "random"}}, "learning_rate=-1"),
        ({"space": {"objective.regularizers.logic.params": [{"nonsense": 1}]}}, "nonsense"),
        ({"space": {"seed": [0, 1]}}, "use seeds"),
        ({"space": {"model": ["tiny", "smollm2-135m"]}}, "'model'"),
        ({"flow": "nothing"}, "flow 'nothing' could not be imported"),
        ({"flow": "tasks.supervised.dataset:build_dataset"}, "no training flow"),
        ({"base": "/nowhere.yaml"}, "could not be read"),
        ({"fixed": {"objective.regularizers": []}, "ablation": "leave_one_out"}, "it has no enabled one"),
        ({"fixed": {WEIGHT.format("logic"): 0}, "weights": "log-grid"}, "the weight of 'logic', which is 0"),
        ({"space": {f"data.params.p{i}": {"low": 0.0, "high": 1.0, "num": 40} for i in range(3)}}, "64,000 points"),
        ({"search": {"method": "random"}}, "nothing to vary"),
        ({"space": {WEIGHT.format("logic"): [1.0]}, "weights": "log-grid"}, "logic.weight, of space or weights, vary"),
        ({"space": {WEIGHT.format("1"): [1.0]}, "weights": "log-grid"}, "regularizers.1.weight and objective.reg"),
        ({"space": {WEIGHT.format("1"): [1.0], WEIGHT.format("logic"): [2.0]}}, "vary the same field: remove one"),
        (
            {"space": {WEIGHT.format("logic"): [1.0], "objective.regularizers": [[], [{"name": "logic"}]]}},
            "logic.weight and objective.regularizers, of space or weights, vary the same field",
        ),
        *(
            (
                {"fixed": {"objective.regularizers": [{"name": name, "fn": "logic"}]}, "ablation": "leave_one_out"},
                f"but {name!r} is a number or has a dot",
            )
            for name in ("1", "v1.logic")
        ),
        (
            {"search": {"method": "random"}, "weights": "log-grid", "weight_factors": [1, 1]},
            "between 1 and 1: set a positive weight and different weight_factors",
        ),
        ({"run_name": "n" * 125}, "run_name"),
    ],
)
def test_invalid_space_is_a_config_error(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    assert message in rejection(tmp_path, **fields)


@pytest.mark.parametrize("dimension", [{"low": 2.0, "high": 1.0}, {"low": 0.0, "high": 1.0, "log": True}, []])
def test_invalid_dimension_is_a_validation_error(dimension: Any) -> None:
    with pytest.raises(ValidationError):
        SweepConfig.model_validate({"run_name": "s", "base": {}, "space": {"learning_rate": dimension}})


def test_ablated_regularizers_are_measured_at_weight_0(tmp_path: Path) -> None:
    sweep = plan(tmp_path, ablation="leave_one_out")
    assert [values["ablation"] for values in sweep.grid] == ["all", *(f"without {n}" for n in NAMES)]
    weights = [weights_of(sweep, values) for values in sweep.grid]
    assert [[name for name in NAMES if weight_by_name[name] == 0.0] for weight_by_name in weights] == [
        [],
        *([name] for name in NAMES),
    ]
    disabled = plan(tmp_path, ablation="one_at_a_time", measure_ablated=False)
    enabled = [
        [spec.name for spec in disabled.config_of(values, "x", 0).objective.regularizers if spec.enabled]
        for values in disabled.grid
    ]
    assert enabled == [[], *([name] for name in NAMES)]


NAMES = ("topology", "logic", "confidence")


def weights_of(sweep: SweepPlan, values: Any) -> dict[str, float]:
    regularizers = sweep.config_of(values, "x", 0).objective.regularizers
    return {spec.name: getattr(spec.weight, "value", spec.weight) for spec in regularizers}  # type: ignore[misc]


def test_example_config_is_a_valid_sweep() -> None:
    sweep = make_plan(load_config(SweepConfig, Path("examples/sweep.yaml"), ["run_name=mine"]))
    assert sweep.num_points == 8
    assert sweep.base["num_steps"] == 12


def test_all_subsets_are_distinct() -> None:
    distinct = {frozenset(subset) for subset in subsets("all_subsets", NAMES).values()}
    assert len(distinct) == 8


def test_weights_of_ablated_regularizers_make_no_points(tmp_path: Path) -> None:
    """Of three weights times two subsets, the three points without the regularizer are one."""
    sweep = plan(
        tmp_path,
        fixed={"objective.regularizers": [{"name": "logic", "weight": 2.0}]},
        ablation="leave_one_out",
        weights="log-grid",
    )
    path = WEIGHT.format("logic")
    assert [dict(values) for values in sweep.grid] == [
        {path: 0.2, "ablation": "all"},
        {"ablation": "without logic"},
        {path: 2.0, "ablation": "all"},
        {path: 20.0, "ablation": "all"},
    ]


@pytest.mark.parametrize("path", ["1.weight", "logic.weight", "1"])
def test_values_of_an_ablated_regularizer_make_no_further_points(tmp_path: Path, path: str) -> None:
    entries = [1.0, 2.0] if path.endswith("weight") else [{"name": "logic", "weight": weight} for weight in (1.0, 2.0)]
    sweep = plan(tmp_path, space={f"objective.regularizers.{path}": entries}, ablation="leave_one_out")
    configs = [sweep.config_of(values, "x", 0).objective.model_dump_json() for values in sweep.grid]
    assert len(configs) == len(set(configs)) == 2 * len(NAMES) + 1  # both values, except without logic


def test_log_grid_scales_a_whole_schedule(tmp_path: Path) -> None:
    sweep = plan(tmp_path, weights="log-grid", weight_factors=[1.0, 10.0])
    path = WEIGHT.format("confidence")
    at_ten = next(values for values in sweep.grid if values[path] == "x10")
    (weight,) = [
        spec.weight for spec in sweep.config_of(at_ten, "x", 0).objective.regularizers if spec.name == "confidence"
    ]
    assert weight.model_dump() == {"schedule": "linear", "start": 0.0, "end": 5.0}  # type: ignore[union-attr]


@pytest.mark.parametrize("method", ["random", "bayesian"])
def test_search_is_deterministic_given_the_tried_points(method: str) -> None:
    config = SweepConfig.model_validate(
        {
            "run_name": "s",
            "base": {},
            "space": {"x": {"low": 1e-3, "high": 1.0, "log": True}, "n": {"low": 1, "high": 9}, "c": ["a", "b"]},
        }
    )
    dims, search = dimensions_of(config, {}), SearchConfig.model_validate({"method": method})
    tried: list[TriedPoint] = []
    for _ in range(4):
        point = next_point(search, dims, "min", tried)
        assert point == next_point(search, dims, "min", tried)
        assert 1e-3 <= point["x"] <= 1.0  # type: ignore[operator]
        assert isinstance(point["n"], int)
        assert point["c"] in ("a", "b")
        tried.append(TriedPoint(point, float(point["x"]), ended=True))
    assert len({point.labels["x"] for point in tried}) == 4


def test_bayesian_search_converges() -> None:
    config = SweepConfig.model_validate({"run_name": "s", "base": {}, "space": {"x": {"low": 0.0, "high": 10.0}}})
    search, tried = SearchConfig(method="bayesian"), []
    for _ in range(40):
        point = next_point(search, dimensions_of(config, {}), "min", tried)
        tried.append(TriedPoint(point, abs(float(point["x"]) - 7.0), ended=True))
    late = [point.mean_metric for point in tried[-10:] if point.mean_metric is not None]
    assert sum(late) / len(late) < 1.5  # the mean distance of uniform draws is 2.9


def test_search_accepts_running_and_failed_points() -> None:
    config = SweepConfig.model_validate({"run_name": "s", "base": {}, "space": {"x": {"low": 0.0, "high": 1.0}}})
    tried = [
        TriedPoint({"x": 0.1}, None, ended=False),
        TriedPoint({"x": 0.2}, None, ended=True),
        TriedPoint({"x": 0.3}, 1.0, ended=True),
    ]
    assert (
        0.0 <= float(next_point(SearchConfig(method="bayesian"), dimensions_of(config, {}), "max", tried)["x"]) <= 1.0
    )


def test_median_rule() -> None:
    pruner = Pruner(PruneConfig(rule="median", min_trials=2, min_steps=2), "min")
    for name, curve in (("a", [(2, 1.0), (4, 0.5)]), ("b", [(2, 2.0), (4, 1.0)])):
        pruner.begin(name, ())
        assert not any(pruner.should_stop(name, step, value) for step, value in curve)
        pruner.end(name, curve[-1][1], pruned=False)
    pruner.begin("good", ())
    assert not pruner.should_stop("good", 1, 9.0)  # before min_steps
    assert not pruner.should_stop("good", 2, 1.4)
    pruner.begin("bad", [(1, 9.0)])
    assert pruner.should_stop("bad", 2, 1.6)


def test_a_trial_that_ends_with_nan_has_failed() -> None:
    pruner = Pruner(PruneConfig(rule="median"), "min")
    pruner.begin("a", ())
    pruner.end("a", math.nan, pruned=False)
    pruner.end("a", 1.0, pruned=False)  # it has ended


def test_a_base_that_never_resumes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="base has resume 'never', but a resumed sweep resumes its trials"):
        plan(tmp_path, fixed={"resume": "never"})


def test_successive_halving_continues_one_of_three() -> None:
    pruner = Pruner(PruneConfig(rule="successive_halving", factor=3, min_steps=2), "max")
    stopped = []
    for name, value in (("a", 3.0), ("b", 1.0), ("c", 2.0), ("d", 4.0)):
        pruner.begin(name, ())
        stopped.append(pruner.should_stop(name, 2, value))
    assert stopped == [False, True, True, False]


def test_successive_halving_counts_a_retried_trial_once() -> None:
    """The second of six trials is among the best third, however often the best one is repeated."""
    pruner = Pruner(PruneConfig(rule="successive_halving", factor=3, min_steps=1), "min")
    for _ in range(3):  # two attempts fail
        pruner.begin("best", ())
        assert not pruner.should_stop("best", 1, 1.0)
    pruner.end("best", 1.0, pruned=False)
    pruner.end("best", None, pruned=False)
    for name, value in (("b", 3.0), ("c", 4.0), ("d", 5.0), ("e", 6.0)):
        pruner.begin(name, ())
        pruner.should_stop(name, 1, value)
    pruner.begin("second", ())
    assert not pruner.should_stop("second", 1, 2.0)


def test_resumed_schedule(tmp_path: Path) -> None:
    """Completed and pruned trials are kept; failed and interrupted trials run again."""
    sweep = plan(tmp_path, space={"learning_rate": [1e-3, 1e-2]}, seeds=[0, 1])
    directory = LocalDirectory(tmp_path / "s")
    schedule = Schedule(sweep, directory)
    trials = [(point.number, seed) for point, seed in iter(schedule.next_trial, None)]
    assert trials == [(1, 0), (1, 1), (2, 0), (2, 1)]
    schedule.record(Trial(1, 0, "s-001-s0", "completed", value=1.0, curve=[(0, 2.0), (4, 1.0)]))
    schedule.record(Trial(1, 1, "s-001-s1", "failed", "The process failed."))
    schedule.record(Trial(2, 0, "s-002-s0", "pruned", value=3.0))
    with (tmp_path / "s" / "trials.jsonl").open("a") as file:
        file.write('{"point": 2, "seed": 1, "sta')  # truncated by a kill
    resumed = Schedule(sweep, LocalDirectory(tmp_path / "s"))
    assert resumed.num_remaining == 2
    remaining = [(point.number, seed) for point, seed in iter(resumed.next_trial, None)]
    assert remaining == [(1, 1), (2, 1)]
    assert read_trials(directory).finished[1, 0].curve == [(0, 2.0), (4, 1.0)]


def test_every_field_has_a_title_and_a_description() -> None:
    schema = SweepConfig.model_json_schema()
    for name, model in {"SweepConfig": schema, **schema["$defs"]}.items():
        for field, properties in model["properties"].items():
            assert properties.get("title"), (name, field)
            assert properties.get("description"), (name, field)


def test_an_ablated_target_is_removed_and_log_grid_refuses_targets(tmp_path: Path) -> None:
    base = sft_fields(tmp_path, "base", f"sqlite:///{tmp_path}/mlflow.db")
    base["objective"] = {"regularizers": [{"name": "confidence", "target": {"at_least": -0.1}}, {"name": "l2"}]}
    limit = "objective.regularizers.confidence.target.at_least"
    sweep = plan(tmp_path, base=base, ablation="leave_one_out", space={limit: [-0.1, -0.2]})
    specs = [sweep.config_of(values, "x", 0).objective.regularizers[0] for values in sweep.grid]
    described = [(spec.target.at_least if spec.target else None, spec.weight) for spec in specs]
    assert sorted(described, key=str) == sorted(
        [(-0.1, None), (-0.1, None), (-0.2, None), (-0.2, None), (None, 0.0)], key=str
    )
    message = rejection(tmp_path, base=base, weights="log-grid")
    assert "'confidence' has a target instead" in message
