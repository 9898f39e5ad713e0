"""A run's record in its own directory and in MLflow: opened at its beginning, found again at every later start."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from mlflow.entities import Param
from prefect.runtime import flow_run
from tinker_cookbook.checkpoint_utils import CheckpointRecord

from blocks import MLflowTracking
from blocks.errors import ConfigError
from blocks.storage import RunDirectory
from flows.config import RunConfig
from tasks.metrics import MetricsLog

# What may differ between the parts of one run: where it computes and how often it looks, never what it trains.
_MAY_CHANGE = {
    "base_url",
    "engine",
    "tracking",
    "experiment",
    "storage",
    "resume",
    "checkpoint_every",
    "eval_every",
}


def check_config(directory: RunDirectory, config: RunConfig, start: CheckpointRecord | None) -> None:
    """Keep the first config of a run as its record, and hold every later one to it.

    Raises:
        ConfigError: the name is in use by a run with another config, or `resume` is `never`.
    """
    fields = config.model_dump(mode="json")
    recorded = directory.read_bytes("config.json")
    if recorded is None:
        directory.write_bytes("config.json", json.dumps(fields, indent=2).encode())
        return
    if config.resume == "never":
        raise ConfigError(
            f"The run name {config.run_name!r} is in use in {directory.location} and resume is `never`: "
            "choose another run_name, or resume: auto to go on with that run."
        )
    before = json.loads(recorded)
    changed = sorted(key for key in fields.keys() - _MAY_CHANGE if fields[key] != before.get(key))
    if changed:
        at = f"at step {start.batch}" if start else "before its first checkpoint"
        raise ConfigError(
            f"The run {config.run_name!r} (now {at}) was started with another {', '.join(changed)}: "
            f"restore it or choose another run_name; the first config is {directory.location}/config.json."
        )


@contextmanager
def open_log(tracking: MLflowTracking, config: RunConfig, directory: RunDirectory) -> Iterator[MetricsLog]:
    """The run's one MLflow run, marked finished, failed or killed at the end; after a kill -9 it stays RUNNING."""
    client = tracking.get_client()
    recorded = directory.read_bytes("mlflow_run_id")
    if recorded is None:
        experiment = tracking.experiment_id(client)
        run_id = client.create_run(experiment, run_name=config.run_name, tags=_tags(config)).info.run_id
        directory.write_bytes("mlflow_run_id", run_id.encode())
        params = [Param(key, str(value)[:6000]) for key, value in _flatten(config.model_dump(mode="json")).items()]
        client.log_batch(run_id, params=params)
    else:
        run_id = recorded.decode()
        client.update_run(run_id, status="RUNNING")
    log = MetricsLog(client, run_id)
    status = "FAILED"
    try:
        yield log
        log.flush()
        status = "FINISHED"
    except KeyboardInterrupt:
        status = "KILLED"
        raise
    finally:
        client.set_terminated(run_id, status=status)


def _tags(config: RunConfig) -> dict[str, str]:
    tags = {
        "prefect.flow_run_id": flow_run.get_id() or "",
        "prefect.flow_name": flow_run.get_flow_name() or "",
        "tinker.base_url": config.base_url or "from the environment",
        "mlflow.source.git.commit": _commit(),
    }
    return {key: value for key, value in tags.items() if value}


def _commit() -> str:
    """The commit of the working directory; empty outside a git checkout."""
    git = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return git.stdout.strip()


def _flatten(fields: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in fields.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{key}.")
        elif isinstance(value, list) and value and isinstance(value[0], Mapping):
            flat |= _flatten({str(item.get("name", i)): item for i, item in enumerate(value)}, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
