"""Config fields of a small dpo run on the tiny model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from run_config import run_fields


def dpo_fields(folder: Path, run_name: str, tracking: str, base_url: str = "local") -> dict[str, Any]:
    """Return a run of four steps of four pairs, stored in `folder`."""
    return run_fields(folder, run_name, tracking, base_url) | {
        "lora_rank": 4,
        "learning_rate": 3e-3,
        "num_steps": 4,
        "eval_every": 4,
        "checkpoint_every": 2,
        "renderer_name": "role_colon",
        "batch_size": 4,
        "comparisons": {
            "builder": "tinker_cookbook.preference.preference_datasets:ComparisonBuilderFromJsonl",
            "params": {
                "train_path": "examples/data/preferences_train.jsonl",
                "test_path": "examples/data/preferences_test.jsonl",
            },
        },
    }
