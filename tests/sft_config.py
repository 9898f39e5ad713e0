"""Config fields of a small sft run on the tiny model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from run_config import run_fields


def sft_fields(folder: Path, run_name: str, tracking: str, base_url: str = "local") -> dict[str, Any]:
    """Return a run of eight steps of GSM8K with three regularizers, stored in `folder`."""
    return run_fields(folder, run_name, tracking, base_url) | {
        "lora_rank": 4,
        "learning_rate": 1e-2,
        "num_steps": 8,
        "eval_every": 4,
        "checkpoint_every": 2,
        "report": {"num_examples": 0},  # sampling takes longer than the other work of such a small run
        "data": {
            "builder": "examples.gsm8k:Gsm8kBuilder",
            "params": {
                "contrast": True,  # two completions of each problem, so that scores can be compared
                "common_config": {"renderer_name": "qwen3_instruct", "max_length": 768, "batch_size": 2},
            },
        },
        "objective": {
            "regularizers": [
                {"name": "topology", "weight": 1.0},
                {"name": "logic", "weight": 2.0},
                {"name": "confidence", "weight": {"schedule": "linear", "start": 0.0, "end": 0.5}},
            ]
        },
    }
