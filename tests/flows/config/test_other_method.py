"""Config of one method given to another: the error names the method that has all of its fields."""

from __future__ import annotations

from pathlib import Path

import pytest

from blocks.errors import ConfigError
from flows.config.dpo import DpoConfig
from flows.config.loader import load_config, validate_fields
from flows.config.train import SftConfig

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.mark.parametrize(
    ("file", "method"),
    [("dpo", "dpo"), ("rl", "rl"), ("rlhf", "rlhf"), ("self_distillation", "self_distillation")],
)
def test_error_names_the_method_of_the_config(file: str, method: str) -> None:
    looks_like = f"unknown, but this looks like a config of {method}"
    expected = f"{looks_like}: use tinker-flows run {method}, or --method {method} with `tinker-flows estimate`"
    with pytest.raises(ConfigError, match=expected):
        load_config(SftConfig, EXAMPLES / f"{file}.yaml", [])


def test_error_names_all_methods_with_the_fields() -> None:
    methods = ("on_policy_distillation", "off_policy_distillation")
    with pytest.raises(ConfigError, match=f"use {' or '.join(f'tinker-flows run {method}' for method in methods)}, or"):
        load_config(DpoConfig, EXAMPLES / "on_policy_distillation.yaml", [])


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"learning_rat": 1}, "'learning_rat' is unknown; did you mean 'learning_rate'"),
        ({"budget": {"hour": 1}}, "'budget.hour' is unknown; did you mean 'hours'"),
    ],
)
def test_misspelled_field_is_no_other_method(fields: dict[str, object], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        validate_fields(SftConfig, fields)
