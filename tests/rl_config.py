"""Config fields of a small rl run on the tiny model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from run_config import run_fields


def rl_fields(folder: Path, run_name: str, tracking: str, base_url: str = "local") -> dict[str, Any]:
    """Return a run of four steps of two groups of four completions, stored in `folder`."""
    return run_fields(folder, run_name, tracking, base_url) | {
        "lora_rank": 8,
        "learning_rate": 2e-2,
        "num_steps": 4,
        "eval_every": 4,
        "checkpoint_every": 2,
        "rollout": {"max_tokens": 8},
        "environment": {
            "builder": "examples.letters:LettersBuilder",
            "params": {"renderer_name": "role_colon", "group_size": 4},
        },
    }
