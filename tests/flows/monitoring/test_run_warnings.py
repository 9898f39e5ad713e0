"""Warnings of a run show the same sentence at its start, at its end, in its report and in its status."""

from __future__ import annotations

import html
from pathlib import Path

import pytest
from mlflow import MlflowClient
from rl_config import rl_fields

from deployments.status import show_run
from flows.config.rl import RlConfig
from flows.rl import rl
from flows.runs.cli import run
from flows.runs.show import show_result
from tasks.common.task import step_task

pytestmark = pytest.mark.usefixtures("prefect_server")


@step_task(name="traces")
def write_no_traces(*_: object) -> None:
    raise TypeError("Object of type X is not JSON serializable")


def test_rewards_that_teach_nothing(
    tmp_path: Path,
    engine_url: str,
    mlflow_uri: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Neither does a trace that cannot be written end the run."""
    monkeypatch.setenv("TINKER_API_KEY", "tml-test")
    monkeypatch.setattr("flows.rl.write_traces", write_no_traces)
    fields = rl_fields(tmp_path, "single", mlflow_uri, engine_url)
    fields |= {"num_steps": 2, "eval_every": 2, "transcripts_every": 2}
    fields["environment"]["params"]["group_size"] = 1
    result = run(rl, RlConfig.model_validate(fields))
    tags = MlflowClient(mlflow_uri).get_run(result.mlflow_run_id).data.tags
    sentences = [text for key, text in tags.items() if key.startswith("tinker_flows.warning.")]
    assert len(sentences) >= 2
    assert any(text.startswith("group_size is 1") for text in sentences)
    incomplete = (
        "The traces of the rollouts of step 0 in MLflow are incomplete (Object of type X is not JSON serializable)"
    )
    assert any(incomplete in text for text in sentences)
    assert any("all rewards are equal (mean " in text for text in sentences)
    assert sorted(sentences) == sorted(result.warnings)
    start = capsys.readouterr().err
    show_result(result)
    end = capsys.readouterr().out
    show_run("single", str(tmp_path / "runs"), as_json=False)
    status = capsys.readouterr().out
    report = html.unescape(Path(result.report).read_text())
    for sentence in sentences:
        assert [text.count(sentence) for text in (start, end, status, report)] == [1, 1, 1, 1], sentence
    assert "last batch   reward=" in end
    assert "per minute" not in end  # the lines of the steps have the pace
    assert "total_episodes" not in end
    assert result.directory in status.splitlines()[-1 - len(sentences)]
