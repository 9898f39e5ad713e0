"""Data of a run as datasets in MLflow and as assets in Prefect, from which its checkpoints and versions derive."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlflow.entities import Dataset, DatasetInput, InputTag
from mlflow.exceptions import MlflowException
from prefect.assets import Asset

from blocks.errors import reason
from blocks.files.local import path_of
from flows.config.base import RunConfig
from flows.monitoring.run_tags import note_warning
from flows.runs.tracking.mlflow_run import flatten
from tasks.common.assets import asset_key, describe_asset
from tasks.common.digests import digest_text
from tasks.reports.summary import DATA_PARAMS
from tasks.training.tracking.metrics import MetricsLog

_CONTEXT = "mlflow.data.context"
_MAX_SOURCE = 65_535  # MLflow's limit, in characters
_EVALUATION = re.compile(r"(^|[._])(test|eval|evaluation|evaluators|held_out|validation)([._]|$)")
_TYPES = {str: "string", bool: "boolean", int: "long", float: "double"}


def log_datasets(log: MetricsLog, config: RunConfig, digests: Mapping[str, str], first_batch: str) -> None:
    """Log the data files of a run with their digests, columns and numbers of rows, or the builder of the data.

    MLflow stores a dataset with the same name and digest once, so a run that starts again adds nothing.

    Args:
        digests: digest of each piece of data by the value of the config that names it. Values that are not paths of
            local files are skipped.
        first_batch: digest of the first batch, which identifies the data of a builder whose config names no file;
            empty for sampled data.
    """
    fields = flatten(config.model_dump(mode="json"))
    datasets = [
        DatasetInput(_dataset(path, digest), [InputTag(_CONTEXT, _context(fields, text))])
        for text, digest in digests.items()
        if (path := path_of(text)) and path.is_file()
    ]
    builder = next((key for key in DATA_PARAMS if key in fields), None)
    if not datasets and first_batch and builder:
        section = builder.partition(".")[0]
        source = json.dumps({key: value for key, value in fields.items() if key.startswith(f"{section}.")})
        if len(source) > _MAX_SOURCE:
            source = json.dumps({builder: fields[builder], "digest": digest_text(source)})
        dataset = Dataset(str(fields[builder]), first_batch, source_type="code", source=source)
        datasets = [DatasetInput(dataset, [InputTag(_CONTEXT, "training")])]
    if datasets:
        try:
            log.client.log_inputs(log.run_id, datasets)
        except MlflowException as error:
            note_warning(log, "datasets", f"MLflow did not store the datasets of the run ({reason(error)}).")


def data_assets(config: RunConfig, digests: Mapping[str, str]) -> list[Asset]:
    """Return the data of a run as Prefect assets: its files with digest and rows, or else the builder.

    Args:
        digests: see `log_datasets`.
    """
    assets: list[Asset] = []
    for text, digest in digests.items():
        path = path_of(text)
        if path and path.is_file():
            columns, num_rows = _describe(path) if path.suffix == ".jsonl" else ([], None)
            rows = "" if num_rows is None else f"{num_rows} rows"
            names = ", ".join(str(column["name"]) for column in columns)
            parts = [f"digest {digest}", rows, names and f"columns {names}"]
            assets.append(describe_asset(asset_key(text), "; ".join(filter(None, parts))))
    fields = flatten(config.model_dump(mode="json"))
    builder = next((str(fields[key]) for key in DATA_PARAMS if fields.get(key)), "")
    if not assets and builder:
        assets.append(describe_asset(asset_key(f"python://{builder.replace(':', '/')}"), "builder of the data"))
    return assets


def _context(fields: Mapping[str, object], text: str) -> str:
    """Return MLflow's name for the use of a file, `training` or `evaluation`, by the config field that names it."""
    field = next((field for field, value in fields.items() if text == value or _has(value, text)), "")
    return "evaluation" if _EVALUATION.search(field) else "training"


def _has(value: object, text: str) -> bool:
    return isinstance(value, list) and text in value


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


def _describe(path: Path) -> tuple[list[dict[str, Any]], int | None]:
    """Return the columns of a JSONL file's first row, in MLflow's format, and the number of rows.

    A file in another format has no columns, and None as the number of rows.
    """
    first: object = None
    num_rows = 0
    try:
        with path.open(encoding="utf-8-sig") as file:
            for line in filter(str.strip, file):
                first = json.loads(line) if first is None else first
                num_rows += 1
    except (OSError, ValueError):  # a builder of the user reads another format
        return [], None
    columns = first.items() if isinstance(first, dict) else ()
    return [
        {"name": name, "type": _TYPES.get(type(value), "any"), "required": True} for name, value in columns
    ], num_rows
