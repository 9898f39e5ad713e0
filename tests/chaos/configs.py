"""Run configs, identical for the reference run of a kind and its runs under faults."""

from __future__ import annotations

from pathlib import Path
from string import ascii_letters
from typing import Any

from chaos.schedule import GROUPS, NUM_STEPS, Schedule
from chaos.servers import BUCKET, Testbed

ROOT = Path(__file__).parents[2]
MAX_STALENESS = 2
_MODES: dict[str, dict[str, Any]] = {
    "sync": {},
    "stream": {"mode": "stream", "num_minibatches": 2},
    "async": {"mode": "async", "max_steps_off_policy": MAX_STALENESS},
    "refill": {},
    "served": {},
}
# Corrections with ratios of logprobs that the trainer recomputes.
_CORRECTIONS: dict[str, dict[str, Any]] = {
    "stream": {"ratio": "sequence", "bound": "mask", "low": 0.5},
    "async": {"ratio": "token", "off_policy_above": 0.05},
}
# The evaluations at the first and at the last step log `many_points.NUM_POINTS` metrics.
_WIDE: dict[str, Any] = {
    "infrequent_evaluators": [{"builder": "chaos.many_points:ManyPoints"}],
    "infrequent_eval_every": NUM_STEPS,
}


def flow_module(kind: str) -> str:
    """Return the module whose command runs a kind."""
    return "flows.rl" if kind in _MODES else "flows.sft"


def storage_of(testbed: Testbed, schedule: Schedule) -> str:
    return f"s3://{BUCKET}/kept" if schedule.storage == "s3" else str(testbed.folder / "kept")


def config_of(testbed: Testbed, schedule: Schedule, name: str) -> dict[str, Any]:
    """Return the config of a run as plain data."""
    fields = {
        "run_name": name,
        "model": "tiny",
        "base_url": testbed.url("engine"),
        "storage": storage_of(testbed, schedule),
        "tracking": testbed.url("mlflow"),
        "max_restarts": 10,
        "lora_rank": 4,
        "learning_rate": 1e-2,
        "checkpoint_every": 4,
    }
    if schedule.kind in _MODES:
        return fields | _rl_fields(schedule.kind) | _graded_fields(testbed, schedule.kind)
    return fields | _sft_fields(testbed) | (_WIDE if schedule.kind == "wide" else {})


def _sft_fields(testbed: Testbed) -> dict[str, Any]:
    return {
        "num_epochs": 2,
        "eval_every": 6,
        "data": {
            "builder": "examples.gsm8k:Gsm8kBuilder",
            "params": {
                "contrast": True,
                "train_path": str(_rows(testbed.folder, "train", NUM_STEPS)),
                "test_path": str(_rows(testbed.folder, "test", 8)),
                "common_config": {"renderer_name": "qwen3_instruct", "max_length": 512, "batch_size": 2},
            },
        },
        # Gradnorm learns the weights of the terms, so a resume must also restore the state of the objective.
        "objective": {"regularizers": [{"name": "topology"}, {"name": "logic"}], "balance": {"method": "gradnorm"}},
    }


def _rl_fields(mode: str) -> dict[str, Any]:
    """Return the RL fields. Each group has its own letter, so its tag reveals a group that was trained on twice."""
    return {
        "num_steps": NUM_STEPS,
        "eval_every": 12,
        "transcripts_every": 1,
        "rollout": {"max_tokens": 8},
        "schedule": {"groups_per_batch": GROUPS, **_MODES[mode]},
        "correction": _CORRECTIONS.get(mode, "auto"),
        # A critic learns from every step, so a resume must also restore what it has learned.
        **({"advantage": {"estimator": "gae", "critic": {}}} if mode == "stream" else {}),
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


def _graded_fields(testbed: Testbed, kind: str) -> dict[str, Any]:
    """Return the fields of the kinds whose completions are graded, in the process of the run or by servers."""
    if kind not in ("refill", "served"):
        return {}
    urls = {"environment_url": testbed.url("environment"), "judge_url": testbed.url("judge")}
    params = {"renderer_name": "role_colon", "letters": ascii_letters[: GROUPS * NUM_STEPS], "group_size": 2}
    fields: dict[str, Any] = {
        "environment": {
            "builder": "chaos.environments:GradedBuilder",
            "params": params | (urls if kind == "served" else {}),
        },
        "objective": {"base_loss": "importance_sampling", "regularizers": [{"name": "length"}]},
    }
    if kind == "refill":
        # Without evaluations and a reference, every further sample of a step is one of a refill.
        fields |= {"eval_every": 0, "advantage": {"drop_constant": True}}
        fields |= {"rollout": {"max_tokens": 8, "refill_rounds": 2}}
    return fields


def _rows(folder: Path, part: str, number: int) -> Path:
    """Write the first `number` rows of GSM8K to a file; two epochs, two problems a batch, are `NUM_STEPS` steps."""
    path = folder / f"{part}.jsonl"
    if not path.exists():
        rows = (ROOT / "examples" / "data" / f"gsm8k_{part}.jsonl").read_text().splitlines()[:number]
        path.write_text("\n".join(rows) + "\n")
    return path
