"""Files and code that a config names are checked before servers start, without importing builders that exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from dpo_config import dpo_fields
from sft_config import sft_fields

from blocks.errors import ConfigError
from deployments.methods import METHODS, config_type_of
from flows.config.dpo import DpoConfig
from flows.config.loader import load_config, validate_fields
from flows.config.references import check_references
from flows.config.train import SftConfig
from objectives.errors import ObjectiveError

ROOT = Path(__file__).parents[3]


def sft(tmp_path: Path, **changes: Any) -> SftConfig:
    return validate_fields(SftConfig, sft_fields(tmp_path, "checked", "") | changes)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"data": {"builder": "examples.gsm8k:Gsm9k"}}, "data.builder is 'examples.gsm8k:Gsm9k', which cannot be imp"),
        ({"data": {"builder": "nowhere:Builder"}}, "data.builder is 'nowhere:Builder', which cannot be imported"),
        ({"evaluators": [{"builder": "examples.nowhere:X"}]}, r"evaluators\.0\.builder is 'examples.nowhere:X'"),
        (
            {"objective": {"regularizers": [{"name": "mine", "fn": "nowhere:term"}]}},
            "The term 'nowhere:term' could not be imp",
        ),
        ({"objective": {"regularizers": [{"name": "topolgy"}]}}, "No term is registered as 'topolgy'; did you mean"),
    ],
)
def test_wrong_code(tmp_path: Path, changes: dict[str, Any], expected: str) -> None:
    with pytest.raises((ConfigError, ObjectiveError), match=expected):
        check_references(sft(tmp_path, **changes))


def test_wrong_file(tmp_path: Path) -> None:
    fields = dpo_fields(tmp_path, "checked", "")
    builder = "tinker_cookbook.preference.preference_datasets:ComparisonBuilderFromJsonl"
    fields["comparisons"] = {"builder": builder, "params": {"train_path": "nowhere.jsonl"}}
    place = re.escape(str(Path.cwd()))
    with pytest.raises(
        ConfigError, match=rf"file nowhere\.jsonl does not exist in {place}: set comparisons\.params\.train_path to an"
    ):
        check_references(validate_fields(DpoConfig, fields))
    fields["comparisons"]["params"]["train_path"] = "gs://bucket/train.jsonl"
    check_references(validate_fields(DpoConfig, fields))
    fields["comparisons"]["params"]["train_path"] = "nowhere.jsonl"
    # A builder of the user may write the file.
    builders = tmp_path / "builders.py"
    builders.write_text("class Writer: ...\n")
    fields["comparisons"]["builder"] = "builders:Writer"
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        check_references(validate_fields(DpoConfig, fields))


@pytest.mark.parametrize("builder", ["os.path:join", "builtins:dict", "tinker_flows:PromptedJudgeBuilder"])
def test_code_without_a_source_of_its_own_is_imported(tmp_path: Path, builder: str) -> None:
    check_references(sft(tmp_path, evaluators=[{"builder": builder}]))


def test_all_examples_pass() -> None:
    num_checked = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        for path in sorted(Path("examples").glob("*.yaml")):
            for method in METHODS:
                try:
                    config = load_config(config_type_of(method), path, [])
                except ConfigError:  # a config of another method or command
                    continue
                check_references(config)
                num_checked += 1
    assert num_checked > 20


@pytest.mark.process
def test_check_does_not_import_the_builder() -> None:
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from flows.config.loader import load_config\n"
        "from flows.config.references import check_references\n"
        "from flows.config.train import SftConfig\n"
        "check_references(load_config(SftConfig, Path('examples/chat_sl.yaml'), []))\n"
        "print([name for name in sys.modules if name.startswith('tinker_cookbook.supervised')])\n"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"
