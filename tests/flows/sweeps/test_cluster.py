"""Trials on a cluster whose worker fails; `test_sweep.py` runs trials on real clusters."""

from __future__ import annotations

from concurrent.futures import Future
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from uuid import uuid4

import pytest
from sft_config import sft_fields

from flows.config.train import SftConfig
from flows.sweeps.backends import cluster
from flows.sweeps.record import SweepLog


def test_a_timeout_of_the_worker_ends_the_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no timeout of the wait for the trial."""
    failed: Future[Any] = Future()
    failed.set_exception(TimeoutError("the worker did not answer"))
    client = SimpleNamespace(submit=lambda *_, **__: failed)
    monkeypatch.setattr(cluster, "open_dask", lambda _: nullcontext(SimpleNamespace(client=client)))
    monkeypatch.setattr(cluster, "pack_trial", lambda *_: b"")
    monkeypatch.setenv("PREFECT__FLOW_RUN_ID", str(uuid4()))
    trials = cluster.TrialCluster("dask", "sft", cast(SweepLog, None), "loss/total")
    outcome = trials.run(SftConfig.model_validate(sft_fields(tmp_path, "trial", "")), lambda *_: None)
    assert (outcome.status, outcome.retryable) == ("failed", True)
    assert "worker failed (TimeoutError: the worker did not answer)" in outcome.reason
