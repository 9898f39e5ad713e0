"""Unusual YAML in files and overrides: each error is one sentence, and no file exhausts the memory."""

from __future__ import annotations

import codecs
import json
from pathlib import Path

import pytest

from blocks.errors import ConfigError
from flows.config.base import BuilderConfig
from flows.config.loader import load_config
from flows.config.plain_data import parse_yaml, read_yaml
from flows.config.rlhf import RlhfConfig
from flows.config.train import SftConfig
from flows.runs.prices import price_of
from flows.sweeps.config import SweepConfig

FIELDS = "run_name: odd\nmodel: tiny\ndata: {builder: 'a:B'}\n"
# Each level lists the level before nine times: 9**9 values.
BILLION_LAUGHS = "a: &a [ha, ha, ha, ha, ha, ha, ha, ha, ha]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (
            b"run_name: caf\xe9\n",
            "is not readable text (invalid continuation byte): save it as UTF-8",
        ),
        (b"model: " + b"[" * 5000 + b"]" * 5000, "is nested too deeply for YAML: remove brackets."),
        (b"model: " + b"[" * 150 + b"]" * 150, "is nested more than 100 levels deep, or an alias contains itself"),
        (b"model: &x [*x]\n", "is nested more than 100 levels deep, or an alias contains itself"),
        (BILLION_LAUGHS.encode(), "has more than 100,000 values after its aliases are expanded: shorten it."),
        (b"model: a\nseed: 1\nmodel: b\n", "has the key 'model' twice, on lines 1 and 3: remove one."),
        (b"data: {seed: 1, seed: 2}\n", "has the key 'seed' twice, on lines 1 and 1: remove one."),
        (b"model: [1,\n", "is not valid YAML (while parsing a flow node"),
        (b"date: 2026-02-31\n", "is not valid YAML (day is out of range for month): fix it."),
        (b"a: \x07\n", "is not readable text (special characters are not allowed): save it as UTF-8, without control"),
        (b"- tiny\n", "is empty or not a mapping: write it as lines of the form field: value."),
        (b"", "is empty or not a mapping: write it as lines of the form field: value."),
    ],
)
def test_odd_files_are_refused_in_one_sentence(tmp_path: Path, content: bytes, expected: str) -> None:
    path = tmp_path / "odd.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_yaml(path)
    assert str(caught.value).startswith(f"The config file {path} {expected}")
    assert "\n" not in str(caught.value)


def test_invalid_json_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text("{")
    with pytest.raises(ConfigError, match=r"config.json is not valid JSON \(Expecting .*\): fix it\.$"):
        read_yaml(path)


def test_a_recorded_trial_is_read_as_a_run_of_its_own(tmp_path: Path) -> None:
    """The engine of a sweep ends with it, and the tags would show the new run as a trial."""
    path = tmp_path / "config.json"
    tags = {"mlflow.parentRunId": "a", "tinker_flows.sweep": "mine", "team": "b"}
    path.write_text(json.dumps({"format_version": 3, "base_url": "block:sweep-mine-0a", "mlflow_tags": tags}))
    assert read_yaml(path) == {"base_url": "local", "mlflow_tags": {"team": "b"}}


def test_invalid_yaml_in_a_price_table_is_reported_once(tmp_path: Path) -> None:
    table = tmp_path / "prices.yaml"
    table.write_text("- {tinker_id: tiny,\n")
    with pytest.raises(ConfigError, match="is not valid YAML") as caught:
        price_of("tiny", "https://tinker.example.com", str(table))
    assert str(caught.value).count("The price table") == 1


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_files_are_read_with_and_without_a_byte_order_mark(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "mark.yaml"
    path.write_text(FIELDS, encoding=encoding)
    assert path.read_bytes().startswith((codecs.BOM_UTF8, codecs.BOM_UTF16, b"run"))
    assert read_yaml(path)["model"] == "tiny"


def test_free_form_fields_of_other_configs_are_checked() -> None:
    for config_type, field in (
        (RlhfConfig, "warm_start"),
        (RlhfConfig, "reward.training"),
        (RlhfConfig, "policy.training"),
        (SweepConfig, "base"),
        (SweepConfig, "fixed"),
    ):
        with pytest.raises(ConfigError, match=rf"invalid: '{field}\.learning_rate' is nan, but input should"):
            load_config(config_type, None, ["run_name=a", "model=tiny", f"{field}.learning_rate=.nan"])


def test_integers_that_yaml_did_not_read_are_limited_as_well() -> None:
    with pytest.raises(ValueError, match="is an integer of more than 64 bits"):
        BuilderConfig(builder="a:B", params={"x": 16**5000})
    assert BuilderConfig(builder="a:B", params={"x": [2**64 - 1, -(2**63), True, None, 1e308]}).params


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("010", 10),
        ("-007", -7),
        ("+0_09", 9),
        ("0", 0),
        ("1_000", 1000),
        ("0x10", 16),
        ("0b11", 3),
        ("01.5", 1.5),
        ("1:30", "1:30"),
        ("190:20:30.15", "190:20:30.15"),
        ("!!int 010", 10),
        ("'010'", "010"),
        ("01a", "01a"),
    ],
)
def test_numbers_are_decimal_as_in_yaml_1_2(text: str, value: object) -> None:
    assert parse_yaml(text, "It") == value


@pytest.mark.parametrize("text", ["007", "1.10", "yes", "2024-01-01", "'007'"])
def test_text_fields_take_the_text_of_an_override(text: str) -> None:
    config = load_config(SftConfig, None, ["model=tiny", "data.builder=a:B", f"run_name={text}", f"register_as={text}"])
    assert config.run_name == config.register_as == text.strip("'")


def test_other_texts_that_yaml_reads_as_numbers_are_explained() -> None:
    hint = (
        r"tags\.x' is 7, but input should be a valid string: quote it, in a command as mlflow_tags\.x=\"'\.\.\.'\"\.$"
    )
    with pytest.raises(ConfigError, match=hint):
        load_config(SftConfig, None, ["model=tiny", "run_name=a", "data.builder=a:B", "mlflow_tags.x=007"])


def test_anchors_and_merge_keys_are_expanded() -> None:
    content = "base: &base {rank: 8, seed: 0}\nfirst: {<<: *base, seed: 1}\nsecond: *base\n"
    fields = parse_yaml(content, "It")
    assert fields["first"] == {"rank": 8, "seed": 1}
    assert fields["second"] == {"rank": 8, "seed": 0}


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("objective=[1,", r"^The argument 'objective=\[1,' is not valid YAML"),
        ("model=&x [*x]", "an alias contains itself"),
        ("learning_rate=.inf", "'learning_rate' is inf, but input should be a finite number"),
        ("learning_rate=.nan", "'learning_rate' is nan, but input should be a finite number"),
        ("lora_rank=10000000000", "'lora_rank' is 10000000000, but input should be less than or equal to 4096"),
        ("objective={regularizers: [{name: kl, weight: .inf}]}", r"weight.* is inf"),
        ("data.params.x=.nan", r"invalid: 'data\.params\.x' is nan, but input should be a finite number\.$"),
        ("data.params={a: [{b: -.inf}]}", r"invalid: 'data\.params\.a\.0\.b' is -inf, but input should be a"),
        ('data.params.x="\\ud800"', r"'data\.params\.x' is '\\ud800', which is not valid Unicode: remove the lone"),
        ('data.params={"\\udfff": 1}', r"the field '\\udfff' is not valid Unicode: remove the lone"),
        ("data.params.x=!!binary /w==", r"'data\.params\.x' is binary: write it as text"),
        (
            "objective={regularizers: [{name: logic, params: {x: .inf}}]}",
            r"\.0\.params\.x' is inf, but",
        ),
        ('mlflow_tags={a: "\\ud800"}', r"'mlflow_tags\.a' is '\\ud800', which is not valid Unicode"),
        ('model="\\ud800"', r"'model' is '\\ud800', which is not valid Unicode"),
        ("evaluators.\u00b2=x", r"refers to '\u00b2', which is not in the list; the entries are none\.$"),
        (f"evaluators.{'1' * 5000}=x", r"refers to '1{100}', which is not in the list"),
        (".".join(["a"] * 5000) + "=x", r"has a path of 5,000 levels, more than 100: name a field\.$"),
        ("lora_rank=0x" + "f" * 5000, r"the integer 0xf{18}\.\.\. needs more than 64 bits"),
        ("lora_rank=1:30", "'lora_rank' is '1:30', but input should be a valid integer"),
        ("lora_rank=!!int 1:30", "is not valid YAML"),
        ("lora_rank=" + "9" * 5000, "is not valid YAML"),
        ("data.params.seed=18446744073709551616", "the integer 18446744073709551616 needs more than 64 bits"),
        ("run_name=!!int ''", "is not valid YAML"),
        ("run_name=!!timestamp x", "is not valid YAML"),
    ],
)
def test_odd_overrides_are_refused_in_one_sentence(tmp_path: Path, override: str, expected: str) -> None:
    path = tmp_path / "sft.yaml"
    path.write_text(FIELDS + "evaluators: []\n")
    with pytest.raises(ConfigError, match=expected) as caught:
        load_config(SftConfig, path, [override])
    assert "\n" not in str(caught.value)
