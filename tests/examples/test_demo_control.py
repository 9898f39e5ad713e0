"""Stored control of the demo."""

from __future__ import annotations

import json
from dataclasses import replace

from benchmarks.demo_control import control_config, demo_config
from examples.demo import CONTROL, describe_nll, read_control
from tasks.reports.tables import Estimate, HeldOutRow


def test_control_differs_from_the_demo_by_the_weights_alone() -> None:
    control, demo = (config.model_dump(mode="json") for config in (control_config(), demo_config()))
    terms = control["objective"].pop("regularizers")
    trained = demo["objective"].pop("regularizers")
    assert [term.pop("weight") for term in terms] == [0.0] * 3
    assert all(term.pop("weight") for term in trained)
    assert terms == trained
    assert control | {"run_name": "demo"} == demo


def test_the_effect_on_nll_is_split_into_right_and_corrupted_solutions() -> None:
    control = read_control()
    stored = control["nll"].batches
    assert stored
    changed = replace(stored, values_B=[value + 0.1 + 0.2 * (row % 2) for row, value in enumerate(stored.values_B)])
    value = Estimate(0.0)
    row = HeldOutRow("nll", 0, 24, value, value, value, changed, False)
    assert describe_nll([row], control).startswith("nll: +0.1 on the right solutions, +0.3 on their corrupted copies")
    assert describe_nll([], control) == ""


def test_stored_control_is_of_the_current_demo() -> None:
    stored, demo = json.loads(CONTROL.read_text()), demo_config()
    assert (stored["num_steps"], stored["seed"]) == (demo.num_steps, demo.seed)
    control = read_control()
    names = {term.name for term in demo.objective.regularizers}
    assert names | {"nll", "nll_per_token", "bits_per_byte"} == set(control)
    assert all(control[name].value.half_width > 0 for name in names)
