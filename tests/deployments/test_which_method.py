"""What the command advises, and the table of models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deployments.command_line import main
from deployments.methods import METHODS
from deployments.which_method import HAVE, Have, advise

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("have", HAVE, ids=lambda have: have.name)
def test_each_thing_that_one_may_have_leads_to_a_method_and_an_example(have: Have) -> None:
    advice = advise({have.name: True})
    assert advice.method in METHODS
    assert (ROOT / advice.command.rpartition(" ")[2]).exists()


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert not ended.value.code
    return capsys.readouterr().out


def test_answers_first_where_there_is_a_reward_too(capsys: pytest.CaptureFixture[str]) -> None:
    advice = json.loads(printed(capsys, "which-method", "--demonstrations", "--reward", "--json"))
    assert (advice["method"], advice["before"]) == ("rl", "tinker-flows run sft --config examples/sft.yaml")
    assert "nothing to learn from" in printed(capsys, "which-method", "--no-reward")


def test_a_service_says_how_long_its_models_read(
    capsys: pytest.CaptureFixture[str], engine_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-test")
    (tiny,) = json.loads(printed(capsys, "models", "--base-url", engine_url, "--json"))
    assert (tiny["model"], tiny["context"], tiny["train"]) == ("tiny", 4096, 0.0)
    assert tiny["auto_rate"] == pytest.approx(0.0126, rel=0.01)
    monkeypatch.delenv("TINKER_API_KEY")
    assert "Qwen/Qwen3-8B" in printed(capsys, "models")
