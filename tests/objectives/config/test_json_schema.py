"""JSON schema of an objective for forms: choices and validation messages."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from objectives.config.spec import ObjectiveSpec
from objectives.config.term_lookup import registered_terms


def schema_errors(value: dict[str, Any]) -> list[str]:
    """Validate an objective with its JSON schema, as a form's server does."""
    return [error.message for error in Draft202012Validator(ObjectiveSpec.model_json_schema()).iter_errors(value)]


def schema_errors_of_term(**fields: Any) -> list[str]:
    return schema_errors({"regularizers": [fields]})


def test_every_registered_term_is_offered() -> None:
    properties = ObjectiveSpec.model_json_schema()["$defs"]["RegularizerSpec"]["properties"]
    assert set(properties["name"]["anyOf"][0]["enum"]) >= registered_terms().keys()
    assert all(re.search(properties["fn"]["pattern"], name) for name in registered_terms())


@pytest.mark.parametrize(
    "fields",
    [
        {"name": "topology"},
        {"name": "topology", "weight": 0},
        {"name": "second", "fn": "topology", "weight": {"schedule": "linear", "start": 0.0, "end": 1.0}},
        {"name": "mine", "fn": "acme.terms:mine", "timeout_s": 3},
    ],
)
def test_valid_objectives_pass_the_schema(fields: dict[str, Any]) -> None:
    assert not schema_errors_of_term(**fields)
    ObjectiveSpec.model_validate({"regularizers": [fields]})


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"name": "topolgy"}, "'topolgy' is not one of ["),
        ({"name": "topolgy", "fn": None}, "'topolgy' is not one of ["),
        ({"name": "a b", "fn": "topology"}, "'a b' does not match"),
        ({"name": "topology", "weight": -1}, "-1 is less than the minimum of 0"),
        ({"name": "topology", "timeout_s": 0}, "0 is less than or equal to the minimum of 0"),
        ({"name": "topology", "wieght": 1}, "('wieght' was unexpected)"),
        ({"weight": 1}, "'name' is a required property"),
        ({"name": "x", "fn": "topolgy"}, "'topolgy' does not match"),
    ],
)
def test_invalid_objectives_give_clear_schema_errors(fields: dict[str, Any], expected: str) -> None:
    assert any(expected in message for message in schema_errors_of_term(**fields))


def test_a_term_of_an_installed_package_is_offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "acme_form-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme_form\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[tinker_flows.regularizers]\nacme_term = acme_form:acme_term\n")
    assert schema_errors_of_term(name="acme_term")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert not schema_errors_of_term(name="acme_term")


def test_base_losses_and_terms_are_accepted() -> None:
    for base_loss in ("ppo", "dpo", {"name": "ppo", "params": {"clip_low_threshold": 0.9}}):
        assert not schema_errors({"base_loss": base_loss})
    assert schema_errors({"base_loss": 3})
