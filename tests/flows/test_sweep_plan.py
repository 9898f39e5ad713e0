"""What a sweep will run: its space, its ablations, what is refused before anything runs, and what is drawn next."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError
from sft_config import sft_fields

from blocks.errors import ConfigError
from blocks.local_directory import LocalDirectory
from flows.config_file import load_config
from flows.sweeps.ablation import subsets
from flows.sweeps.config import PruneConfig, SearchConfig, SweepConfig
from flows.sweeps.plan import SweepPlan, make_plan
from flows.sweeps.pruning import Pruning
from flows.sweeps.schedule import Schedule
from flows.sweeps.search import Tried, next_point
from flows.sweeps.space import dimensions_of
from tasks.trials import Trial, read_trials

WEIGHT = "objective.regularizers.{}.weight"


def plan(tmp_path: Path, **fields: Any) -> SweepPlan:
    base = sft_fields(tmp_path, "base", f"sqlite:///{tmp_path}/mlflow.db")
    return make_plan(SweepConfig.model_validate({"run_name": "s", "base": base, **fields}))


def refusal(tmp_path: Path, **fields: Any) -> str:
    with pytest.raises(ConfigError) as error:
        plan(tmp_path, **fields)
    message = str(error.value)
    assert "\n" not in message
    return message


def test_a_grid_is_every_combination_with_its_fields_in_place(tmp_path: Path) -> None:
    made = plan(tmp_path, space={"learning_rate": [1e-3, 1e-2], WEIGHT.format("logic"): [0.5, 1.0, 2.0]})
    assert [dict(values) for values in made.grid] == [
        {"learning_rate": rate, WEIGHT.format("logic"): weight} for rate in (1e-3, 1e-2) for weight in (0.5, 1.0, 2.0)
    ]
    config = made.config_of(made.grid[3], "s-004-s7", 7)
    assert (config.run_name, config.seed, config.learning_rate) == ("s-004-s7", 7, 1e-2)
    assert weights_of(made, made.grid[3])["logic"] == 0.5
    # Nothing of it is left in the base.
    assert made.base["learning_rate"] == 1e-2
    assert made.base["objective"]["regularizers"][1]["weight"] == 2.0


def test_an_entry_of_a_list_goes_by_its_number_too_and_a_schedule_is_a_value(tmp_path: Path) -> None:
    schedule = {"schedule": "linear", "start": 0.0, "end": 1.0}
    made = plan(tmp_path, space={"objective.regularizers.0.weight": [1.0, schedule]})
    config = made.config_of(made.grid[1], "x", 0)
    assert config.objective.regularizers[0].weight.model_dump() == schedule  # type: ignore[union-attr]


def test_numbers_that_yaml_takes_for_text_are_numbers(tmp_path: Path) -> None:
    fields = yaml.safe_load("{learning_rate: [1e-4, 1e-3], adam.beta1: {low: 1e-1, high: 0.9, num: 2}}")
    assert isinstance(fields["learning_rate"][0], str)
    made = plan(tmp_path, space=fields)
    assert tuple(made.grid[0].values()) == (1e-4, 0.1)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"space": {"learning_rat": [1.0]}}, "there is no field 'learning_rat'"),
        ({"space": {WEIGHT.format("ethics"): [1.0]}}, "no entry 'ethics'; there are topology, logic, confidence"),
        ({"space": {"learning_rate": [1e-3, -1]}}, "with learning_rate=-1"),
        ({"space": {"learning_rate": {"low": -1, "high": 1.0}}, "search": {"method": "random"}}, "learning_rate=-1"),
        ({"space": {"objective.regularizers.logic.params": [{"nonsense": 1}]}}, "nonsense"),
        ({"space": {"seed": [0, 1]}}, "give seeds"),
        ({"space": {"model": ["tiny", "smollm2-135m"]}}, "'model'"),
        ({"flow": "nothing"}, "flow is 'nothing'"),
        ({"flow": "tasks.data:build_dataset"}, "no flow with a parameter `config`"),
        ({"base": "/nowhere.yaml"}, "could not be read"),
        ({"fixed": {"objective.regularizers": []}, "ablation": "leave_one_out"}, "it has none that is enabled"),
        ({"fixed": {WEIGHT.format("logic"): 0}, "weights": "log-grid"}, "that of 'logic' is 0"),
        ({"space": {f"data.params.p{i}": {"low": 0.0, "high": 1.0, "num": 40} for i in range(3)}}, "64,000 points"),
        ({"search": {"method": "random"}}, "nothing differs"),
        ({"run_name": "n" * 125}, "run_name"),
    ],
)
def test_a_bad_space_is_one_sentence_before_anything_runs(tmp_path: Path, fields: dict[str, Any], said: str) -> None:
    assert said in refusal(tmp_path, **fields)


@pytest.mark.parametrize("bad", [{"low": 2.0, "high": 1.0}, {"low": 0.0, "high": 1.0, "log": True}, []])
def test_a_bad_dimension_is_refused_by_the_config(bad: Any) -> None:
    with pytest.raises(ValidationError):
        SweepConfig.model_validate({"run_name": "s", "base": {}, "space": {"learning_rate": bad}})


def test_what_an_ablation_leaves_out_is_measured_at_weight_0(tmp_path: Path) -> None:
    made = plan(tmp_path, ablation="leave_one_out")
    assert [values["ablation"] for values in made.grid] == ["all", *(f"without {n}" for n in NAMES)]
    weights = [weights_of(made, values) for values in made.grid]
    assert [[name for name in NAMES if each[name] == 0.0] for each in weights] == [[], *([name] for name in NAMES)]
    disabled = plan(tmp_path, ablation="one_at_a_time", measure_ablated=False)
    enabled = [
        [each.name for each in disabled.config_of(values, "x", 0).objective.regularizers if each.enabled]
        for values in disabled.grid
    ]
    assert enabled == [[], *([name] for name in NAMES)]


NAMES = ("topology", "logic", "confidence")


def weights_of(made: SweepPlan, values: Any) -> dict[str, float]:
    regularizers = made.config_of(values, "x", 0).objective.regularizers
    return {each.name: getattr(each.weight, "value", each.weight) for each in regularizers}  # type: ignore[misc]


def test_the_example_is_a_sweep() -> None:
    made = make_plan(load_config(SweepConfig, Path("examples/sweep.yaml"), ["run_name=mine"]))
    assert made.num_points == 8
    assert made.base["num_steps"] == 12


def test_all_subsets_are_all() -> None:
    found = subsets("all_subsets", NAMES)
    assert len({frozenset(each) for each in found.values()}) == 8


def test_a_weight_of_what_is_left_out_makes_no_point_of_its_own(tmp_path: Path) -> None:
    """Three weights of logic times two subsets would be six; without logic they are one."""
    made = plan(
        tmp_path,
        fixed={"objective.regularizers": [{"name": "logic", "weight": 2.0}]},
        ablation="leave_one_out",
        weights="log-grid",
    )
    path = WEIGHT.format("logic")
    assert [dict(values) for values in made.grid] == [
        {path: 0.2, "ablation": "all"},
        {"ablation": "without logic"},
        {path: 2.0, "ablation": "all"},
        {path: 20.0, "ablation": "all"},
    ]


def test_a_log_grid_multiplies_a_whole_schedule(tmp_path: Path) -> None:
    made = plan(tmp_path, weights="log-grid", weight_factors=[1.0, 10.0])
    path = WEIGHT.format("confidence")
    at_ten = next(values for values in made.grid if values[path] == "x10")
    (weight,) = [
        each.weight for each in made.config_of(at_ten, "x", 0).objective.regularizers if each.name == "confidence"
    ]
    assert weight.model_dump() == {"schedule": "linear", "start": 0.0, "end": 5.0}  # type: ignore[union-attr]


@pytest.mark.parametrize("method", ["random", "bayesian"])
def test_a_search_draws_the_same_after_the_same_points(method: str) -> None:
    config = SweepConfig.model_validate(
        {
            "run_name": "s",
            "base": {},
            "space": {"x": {"low": 1e-3, "high": 1.0, "log": True}, "n": {"low": 1, "high": 9}, "c": ["a", "b"]},
        }
    )
    dims, search = dimensions_of(config), SearchConfig.model_validate({"method": method})
    tried: list[Tried] = []
    for _ in range(4):
        drawn = next_point(search, dims, "min", tried)
        assert drawn == next_point(search, dims, "min", tried)
        assert 1e-3 <= drawn["x"] <= 1.0  # type: ignore[operator]
        assert isinstance(drawn["n"], int)
        assert drawn["c"] in ("a", "b")
        tried.append(Tried(drawn, float(drawn["x"]), ended=True))
    assert len({each.values["x"] for each in tried}) == 4


def test_a_bayesian_search_closes_in_on_the_best() -> None:
    config = SweepConfig.model_validate({"run_name": "s", "base": {}, "space": {"x": {"low": 0.0, "high": 10.0}}})
    search, tried = SearchConfig(method="bayesian"), []
    for _ in range(40):
        drawn = next_point(search, dimensions_of(config), "min", tried)
        tried.append(Tried(drawn, abs(float(drawn["x"]) - 7.0), ended=True))
    late = [each.value for each in tried[-10:] if each.value is not None]
    assert sum(late) / len(late) < 1.5  # uniform draws are 2.9 away on the mean


def test_a_search_takes_in_what_runs_and_what_failed() -> None:
    config = SweepConfig.model_validate({"run_name": "s", "base": {}, "space": {"x": {"low": 0.0, "high": 1.0}}})
    tried = [
        Tried({"x": 0.1}, None, ended=False),
        Tried({"x": 0.2}, None, ended=True),
        Tried({"x": 0.3}, 1.0, ended=True),
    ]
    assert 0.0 <= float(next_point(SearchConfig(method="bayesian"), dimensions_of(config), "max", tried)["x"]) <= 1.0


def test_the_median_stops_what_is_worse_than_half_of_those_before() -> None:
    pruning = Pruning(PruneConfig(rule="median", min_trials=2, min_steps=2), "min")
    for name, curve in (("a", [(2, 1.0), (4, 0.5)]), ("b", [(2, 2.0), (4, 1.0)])):
        pruning.begin(name, ())
        assert not any(pruning.should_stop(name, step, value) for step, value in curve)
        pruning.end(name, curve[-1][1], pruned=False)
    pruning.begin("good", ())
    assert not pruning.should_stop("good", 1, 9.0)  # before min_steps
    assert not pruning.should_stop("good", 2, 1.4)
    pruning.begin("bad", [(1, 9.0)])
    assert pruning.should_stop("bad", 2, 1.6)


def test_successive_halving_lets_one_of_three_go_on() -> None:
    pruning = Pruning(PruneConfig(rule="successive_halving", factor=3, min_steps=2), "max")
    stopped = []
    for name, value in (("a", 3.0), ("b", 1.0), ("c", 2.0), ("d", 4.0)):
        pruning.begin(name, ())
        stopped.append(pruning.should_stop(name, 2, value))
    assert stopped == [False, True, True, False]


def test_a_schedule_goes_on_where_it_stopped(tmp_path: Path) -> None:
    """What completed or was pruned stays, what failed and what was under way is taken again."""
    made = plan(tmp_path, space={"learning_rate": [1e-3, 1e-2]}, seeds=[0, 1])
    directory = LocalDirectory(tmp_path / "s")
    schedule = Schedule(made, directory)
    taken = []
    while each := schedule.take():
        taken.append((each[0].number, each[1]))
    assert taken == [(1, 0), (1, 1), (2, 0), (2, 1)]
    schedule.end(Trial(1, 0, "s-001-s0", "completed", value=1.0, curve=[(0, 2.0), (4, 1.0)]))
    schedule.end(Trial(1, 1, "s-001-s1", "failed", "It fell over."))
    schedule.end(Trial(2, 0, "s-002-s0", "pruned", value=3.0))
    with (tmp_path / "s" / "trials.jsonl").open("a") as file:
        file.write('{"point": 2, "seed": 1, "sta')  # torn by a kill
    again = Schedule(made, LocalDirectory(tmp_path / "s"))
    assert again.num_left == 2
    left = [(point.number, seed) for point, seed in iter(again.take, None)]
    assert left == [(1, 1), (2, 1)]
    assert read_trials(directory).ended[1, 0].curve == [(0, 2.0), (4, 1.0)]


def test_every_field_of_the_form_has_a_title_and_a_description() -> None:
    schema = SweepConfig.model_json_schema()
    for name, model in {"SweepConfig": schema, **schema["$defs"]}.items():
        for field, properties in model["properties"].items():
            assert properties.get("title"), (name, field)
            assert properties.get("description"), (name, field)
