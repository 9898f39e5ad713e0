"""Reports that are rebuilt from MLflow and the config of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow_store import new_store
from sft_config import sft_fields

from blocks.errors import ConfigError
from blocks.storage import RunStorage
from deployments.run_lookup import find_run, report_of, resume_config
from flows.monitoring.run_tags import REJECTED_TAG
from tasks.reports.html import DESCRIPTION_TAG

LINK = "Prefect: [mine](http://127.0.0.1:4200/runs/flow-run/a)"


@pytest.fixture
def storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Storage with the run `rl`, which has targets for a term and a reward, and whose checkpoint was not registered."""
    monkeypatch.setenv("TINKER_FLOWS_HOME", str(tmp_path / "home"))
    tracking = new_store(tmp_path)
    client = MlflowClient(tracking)
    experiment = client.create_experiment("x", artifact_location=str(tmp_path / "artifacts"))
    run_id = client.create_run(
        experiment, tags={REJECTED_TAG: "worse than the baseline", DESCRIPTION_TAG: f"In progress.\n\n{LINK}"}
    ).info.run_id
    for step in range(8):
        for prefix in ("term/base", "term/kl", "reward/format"):
            client.log_metric(run_id, f"{prefix}/value", 0.5, step=step)
            client.log_metric(run_id, f"{prefix}/multiplier", 0.125, step=step)
    fields = {
        "run_name": "rl",
        "tracking": tracking,
        "experiment": "x",
        "objective": {"regularizers": [{"name": "kl", "target": {"at_most": 0.4}}, {"name": "length", "weight": 1.0}]},
        "rewards": {"format": {"target": {"at_least": 0.1}}, "length": {"weight": 1.0}},
    }
    record = {"name": "8", "batch": 8, "epoch": 0, "final": True, "state_path": "tinker://a", "mlflow_run_id": run_id}
    with RunStorage(url=str(tmp_path / "runs")).run_directory("rl") as directory:
        directory.write_bytes("config.json", json.dumps(fields).encode())
        directory.append_line("checkpoints.jsonl", json.dumps(record))
    return str(tmp_path / "runs")


def test_rebuilt_report_has_the_targets_and_the_reason_against_a_registration(storage: str) -> None:
    text = Path(report_of("rl", storage, rebuild=True)).read_text()

    assert "<b>worse than the baseline</b>" in text
    section = text[text.index("<h2>Targets</h2>") :].partition("</section>")[0]
    rows = [row.split("<td>")[1:] for row in section.split("<tr>")[2:]]
    assert [(row[0], row[1], row[-1].partition("<")[0]) for row in rows] == [
        ("kl", "value at most 0.4", "missed"),
        ("reward/format", "value at least 0.1", "met"),
    ]


def test_rebuilt_report_keeps_the_link_to_the_flow_run(storage: str, tmp_path: Path) -> None:
    report_of("rl", storage, rebuild=True)

    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("x").experiment_id])  # pyright: ignore[reportOptionalMemberAccess]
    description = run.data.tags[DESCRIPTION_TAG]
    assert "In progress" not in description
    assert LINK in description.splitlines()


@pytest.mark.parametrize(("name", "overrides"), [("renamed", []), ("run", ["run_name=other"])])
def test_a_run_resumes_only_under_its_own_name(tmp_path: Path, name: str, overrides: list[str]) -> None:
    fields = sft_fields(tmp_path, "run", "")
    with RunStorage(url=fields["storage"]).run_directory(name) as directory:
        directory.write_bytes("config.json", json.dumps(fields).encode())
    with pytest.raises(ConfigError, match=f"restore the name, or fork .* sft .* run_name=NEW resume={name}`"):
        resume_config(find_run(name, fields["storage"]), overrides)


def test_a_path_is_no_name_of_a_run(storage: str) -> None:
    for path in (f"{storage}/rl", "../runs/rl", "rl/"):
        with pytest.raises(ConfigError, match="is a path: use the name of its directory"):
            find_run(path, storage)
