"""Resume runs that tinker-cookbook's supervised loop started or continued."""

from __future__ import annotations

import json
from typing import Any

from tinker_cookbook.checkpoint_utils import CheckpointRecord

from blocks.storage import RunDirectory

CONFIG_NAME = "config.json"
COOKBOOK_CONFIG_NAME = "config.cookbook.json"


def set_aside_config(directory: RunDirectory) -> bool:
    """Copy tinker-cookbook's config.json to config.cookbook.json; return False if the directory contains none.

    The caller then overwrites config.json.
    """
    content = directory.read_bytes(CONFIG_NAME)
    if content is None or not has_cookbook_config(directory):
        return False
    directory.write_bytes(COOKBOOK_CONFIG_NAME, content)
    return True


def has_cookbook_config(directory: RunDirectory) -> bool:
    """Return whether the directory contains a config.json of tinker-cookbook."""
    return "log_path" in _fields(directory.read_bytes(CONFIG_NAME) or b"{}")


def cookbook_step(directory: RunDirectory, record: CheckpointRecord, steps_per_epoch: int) -> int:
    """Return the number of updates in a checkpoint of tinker-cookbook, which is the next step to run.

    Its supervised loop (0.5.8 to 0.6.1) saves when batch `batch` of epoch `epoch` and the next `submit_ahead` batches
    are already submitted, but records `batch` itself. Resuming at `batch` would train on these batches twice.
    """
    config = _fields(directory.read_bytes(COOKBOOK_CONFIG_NAME) or b"{}")
    num_steps = steps_per_epoch * int(config.get("num_epochs") or 1)
    if config.get("max_steps") is not None:
        num_steps = min(num_steps, int(config["max_steps"]))
    if record.name == "final":
        return num_steps
    submitted = int(record.epoch or 0) * steps_per_epoch + int(record.batch or 0) + 1
    return min(submitted + int(config.get("submit_ahead", 1)), num_steps)


def _fields(content: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(content)
    except ValueError:
        return {}
    return fields if isinstance(fields, dict) else {}
