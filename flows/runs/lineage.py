"""Data of a run as datasets of its MLflow run, which lead from a registered version back to its rows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlflow.entities import Dataset, DatasetInput, InputTag

from flows.config.base import RunConfig
from flows.runs.mlflow_run import flatten
from tasks.reports.summary import DATA_PARAMS
from tasks.training.metrics import MetricsLog

_CONTEXT = "mlflow.data.context"
_TYPES = {str: "string", bool: "boolean", int: "long", float: "double"}


def log_datasets(log: MetricsLog, config: RunConfig, digests: Mapping[str, str], first_batch: str) -> None:
    """Log the data files of a run with their digests, columns and numbers of rows, or the builder of the data.

    MLflow stores a dataset with the same name and digest once, so a run that starts again adds nothing.

    Args:
        digests: digests of data by the text in the config that names them; texts that name no file are left out.
        first_batch: digest of the first batch, which identifies the data of a builder whose config names no file;
            empty for sampled data.
    """
    fields = flatten(config.model_dump(mode="json"))
    datasets = [
        DatasetInput(_dataset(path, digest), [InputTag(_CONTEXT, _context(fields, text))])
        for text, digest in digests.items()
        if (path := Path(text).expanduser()).is_file()
    ]
    builder = next((key for key in DATA_PARAMS if key in fields), None)
    if not datasets and first_batch and builder:
        section = builder.partition(".")[0]
        source = json.dumps({key: value for key, value in fields.items() if key.startswith(f"{section}.")})
        dataset = Dataset(str(fields[builder]), first_batch, source_type="code", source=source)
        datasets = [DatasetInput(dataset, [InputTag(_CONTEXT, "training")])]
    if datasets:
        log.client.log_inputs(log.run_id, datasets)


def _context(fields: Mapping[str, object], text: str) -> str:
    """Return MLflow's word for the use of a file, which the name of its field tells."""
    field = next((field for field, value in fields.items() if value == text), "")
    return "evaluation" if "test" in field or "eval" in field else "training"


def _dataset(path: Path, digest: str) -> Dataset:
    columns, num_rows = _describe(path) if path.suffix == ".jsonl" else ([], None)
    return Dataset(
        name=path.name,
        digest=digest,
        source_type="local",
        source=json.dumps({"uri": str(path.absolute())}),
        schema=json.dumps({"mlflow_colspec": columns}) if columns else None,
        profile=json.dumps({"num_rows": num_rows}) if num_rows is not None else None,
    )


def _describe(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the columns of the first row of a JSONL file in MLflow's format, and the number of rows."""
    first: object = None
    num_rows = 0
    with path.open(encoding="utf-8-sig") as file:
        for line in filter(str.strip, file):
            first = json.loads(line) if first is None else first
            num_rows += 1
    columns = first.items() if isinstance(first, dict) else ()
    return [
        {"name": name, "type": _TYPES.get(type(value), "any"), "required": True} for name, value in columns
    ], num_rows
