"""Config fields of a small rlhf run on the tiny model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from run_config import run_fields

from examples.preferences import DATA


def rlhf_fields(folder: Path, run_name: str, tracking: str, base_url: str = "local") -> dict[str, Any]:
    """Return a run of two steps per stage on a few rows, stored in `folder`."""
    for part, num_rows in (("train", 8), ("test", 4)):
        lines = (DATA / f"preferences_{part}.jsonl").read_text().splitlines(keepends=True)
        (folder / f"{part}.jsonl").write_text("".join(lines[:num_rows]))
    steps = {"learning_rate": 3e-3, "num_steps": 2, "eval_every": 2, "checkpoint_every": 1}
    return run_fields(folder, run_name, tracking, base_url) | {
        "lora_rank": 4,
        "comparisons": {
            "builder": "tinker_cookbook.preference.preference_datasets:ComparisonBuilderFromJsonl",
            "params": {f"{part}_path": str(folder / f"{part}.jsonl") for part in ("train", "test")},
        },
        "warm_start": steps
        | {
            "data": {
                "builder": "tinker_cookbook.supervised.data:FromConversationFileBuilder",
                "params": {
                    "file_path": str(DATA / "sums.jsonl"),
                    "common_config": {"max_length": 256, "batch_size": 4},
                },
            }
        },
        "reward": {"batch_size": 4, "max_length": 256, "training": steps},
        "policy": {"batch_size": 2, "group_size": 2, "training": steps | {"rollout": {"max_tokens": 8}}},
    }
