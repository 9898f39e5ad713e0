"""Stored control of the demo."""

from __future__ import annotations

import json

from benchmarks.demo_control import control_config, demo_config
from examples.demo import CONTROL, read_control


def test_control_differs_from_the_demo_by_the_weights_alone() -> None:
    control, demo = (config.model_dump(mode="json") for config in (control_config(), demo_config()))
    terms = control["objective"].pop("regularizers")
    trained = demo["objective"].pop("regularizers")
    assert [term.pop("weight") for term in terms] == [0.0] * 3
    assert all(term.pop("weight") for term in trained)
    assert terms == trained
    assert control | {"run_name": "demo"} == demo


def test_stored_control_is_of_the_current_demo() -> None:
    stored, demo = json.loads(CONTROL.read_text()), demo_config()
    assert (stored["num_steps"], stored["seed"]) == (demo.num_steps, demo.seed)
    control = read_control()
    names = {term.name for term in demo.objective.regularizers}
    assert names | {"nll", "nll_per_token", "bits_per_byte"} == set(control)
    assert all(control[name].value.half_width > 0 for name in names)
