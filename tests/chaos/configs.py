"""What a run of each kind trains on: the same for the undisturbed one and for those that faults befall."""

from __future__ import annotations

from pathlib import Path
from string import ascii_letters
from typing import Any

from chaos.schedule import NUM_STEPS, Schedule
from chaos.servers import BUCKET, Stage

ROOT = Path(__file__).parents[2]
GROUPS = 2  # of a step of rl
MAX_STALENESS = 2
_MODES: dict[str, dict[str, Any]] = {
    "sync": {},
    "stream": {"mode": "stream", "num_minibatches": 2},
    "async": {"mode": "async", "max_steps_off_policy": MAX_STALENESS},
}


def flow_of(kind: str) -> str:
    """The module of a kind's command."""
    return "flows.sft" if kind == "sft" else "flows.rl"


def storage_of(stage: Stage, schedule: Schedule) -> str:
    return f"s3://{BUCKET}/kept" if schedule.storage == "s3" else str(stage.folder / "kept")


def config_of(stage: Stage, schedule: Schedule, name: str) -> dict[str, Any]:
    """The config of a run, as plain data."""
    fields = {
        "run_name": name,
        "model": "tiny",
        "base_url": stage.url("engine"),
        "storage": storage_of(stage, schedule),
        "tracking": stage.url("mlflow"),
        "max_restarts": 10,
        "lora_rank": 4,
        "learning_rate": 1e-2,
        "checkpoint_every": 4,
    }
    return fields | (_rows_to_learn(stage) if schedule.kind == "sft" else _groups_to_play(schedule.kind))


def _rows_to_learn(stage: Stage) -> dict[str, Any]:
    return {
        "num_epochs": 2,
        "eval_every": 6,
        "data": {
            "builder": "examples.gsm8k:Gsm8kBuilder",
            "params": {
                "corrupted_share": 0.5,
                "train_path": str(_rows(stage.folder, "train", 2 * NUM_STEPS)),
                "test_path": str(_rows(stage.folder, "test", 8)),
                "common_config": {"renderer_name": "qwen3_instruct", "max_length": 512, "batch_size": 4},
            },
        },
        # Learned weights, so that what the objective remembers has to come back too.
        "objective": {"regularizers": [{"name": "topology"}, {"name": "logic"}], "balance": {"method": "gradnorm"}},
    }


def _groups_to_play(mode: str) -> dict[str, Any]:
    """Each group of the run has a letter of its own, and so a tag that says whether it was trained on twice."""
    return {
        "num_steps": NUM_STEPS,
        "eval_every": 12,
        "transcripts_every": 1,
        "rollout": {"max_tokens": 8},
        "schedule": {"groups_per_batch": GROUPS, **_MODES[mode]},
        "environment": {
            "builder": "examples.letters:LettersBuilder",
            "params": {
                "renderer_name": "role_colon",
                "letters": ascii_letters[: GROUPS * NUM_STEPS],
                "group_size": 2,
            },
        },
        "objective": {
            "base_loss": "ppo" if mode == "async" else "importance_sampling",
            "regularizers": [{"name": "kl", "weight": 0.1}, {"name": "length"}],
        },
    }


def _rows(folder: Path, part: str, number: int) -> Path:
    """The first rows of GSM8K, so many that two epochs in batches of four are `NUM_STEPS` steps."""
    path = folder / f"{part}.jsonl"
    if not path.exists():
        rows = (ROOT / "examples" / "data" / f"gsm8k_{part}.jsonl").read_text().splitlines()[:number]
        path.write_text("\n".join(rows) + "\n")
    return path
