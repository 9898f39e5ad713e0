"""Supervised run with terms on a Dask cluster, compared with the same run without a cluster."""

from __future__ import annotations

from pathlib import Path

import pytest
from mlflow import MlflowClient
from sft_config import sft_fields

from flows.config.train import SftConfig
from flows.sft import sft

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("prefect_server")]


def test_terms_on_dask_equal_terms_in_threads(
    tmp_path: Path, engine_url: str, mlflow_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(
        "prefect_dask", reason="the extra dask is not installed: pip install -c constraints.txt -e '.[dask]'"
    )
    for name in ("DASK_SCHEDULER_ADDRESS", "DASK_SCHEDULER__ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TINKER_API_KEY", "tml-test")
    runs = []
    for kind in ("dask", "threads"):
        fields = sft_fields(tmp_path, kind, mlflow_uri, engine_url) | {"num_steps": 3, "eval_every": 0}
        terms = [{"name": name, "weight": 2.0, "timeout_s": 60.0} for name in ("logic", "length")]
        objective = {"regularizers": terms}
        runs.append(sft(SftConfig.model_validate(fields | {"objective": objective, "task_runner": {"kind": kind}})))
    history = MlflowClient(mlflow_uri).get_metric_history
    for key in ("train_mean_nll", "term/logic/value", "term/logic/grad_norm", "term/length/grad_norm"):
        dask, thread = ([point.value for point in history(run.mlflow_run_id, key)] for run in runs)
        assert len(dask) == 3
        assert dask == thread
