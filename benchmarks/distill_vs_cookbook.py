"""On-policy distillation flow, against tinker-cookbook's `distillation/train_on_policy.py`.

Both loops run in separate processes with the same engine, prompts, teacher and number of steps. The flow uses one task
run for all its steps (`granularity: segment`). The dataset records the time of each batch request, one per step in both
loops. The first four steps are excluded, and the last one has no next request that would show its duration.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.flow_run import run_flow
from benchmarks.rows import Row
from benchmarks.scratch import KEY, bench_engine, environment, run_module, scratch_home
from blocks.files.local import home
from engine.models import resolve_model

BATCH_SIZE = 8
GROUP_SIZE = 4
MAX_TOKENS = 32
RANK = 8
LEARNING_RATE = 1e-3
_QUESTIONS = Path(__file__).parent.parent / "examples" / "data" / "gsm8k_train.jsonl"


def measure(*, repetitions: int = 3, steps: int = 24) -> list[Row]:
    """Return one row: steps per second."""
    ours, peer = [], []
    with scratch_home() as folder:
        model = str(resolve_model("tiny", home() / "cache"))
        with bench_engine(folder, model) as url, environment(TINKER_BASE_URL=url, TINKER_API_KEY=KEY):
            for number in tqdm(range(repetitions), desc="distill_vs_cookbook"):
                ours.append(_run_flow(folder / f"flow-{number}", model, steps))
                peer.append(_run_cookbook(folder / f"cookbook-{number}", model, steps))
    size = f"tiny, {BATCH_SIZE} groups of {GROUP_SIZE} completions of {MAX_TOKENS} tokens"
    name = f"distill_vs_cookbook: on-policy distillation, {size}"
    return [Row(name, "steps/s", ours, peer, peer_name="tinker_cookbook.distillation.train_on_policy")]


def question_params(times: str) -> dict[str, Any]:
    """Return the dataset parameters of both loops."""
    return {
        "path": str(_QUESTIONS),
        "renderer_name": "qwen3_instruct",
        "batch_size": BATCH_SIZE,
        "group_size": GROUP_SIZE,
        "times": times,
    }


def _run_flow(folder: Path, model: str, steps: int) -> float:
    times = folder / "times"
    builder = {"builder": "benchmarks.timed_data:TimedQuestionsBuilder", "params": question_params(str(times))}
    config = {
        "model": model,
        "lora_rank": RANK,
        "learning_rate": LEARNING_RATE,
        "lr_schedule": "constant",
        "num_steps": steps,
        "checkpoint_every": 1000,
        "granularity": "segment",
        "batch_size": BATCH_SIZE,
        "rollout": {"max_tokens": MAX_TOKENS},
        "datasets": [{"environment": builder, "teacher": {"model": model}}],
    }
    run_flow(["deployments.command_line", "run", "on_policy_distillation"], folder, config)
    return _rate(times)


def _run_cookbook(folder: Path, model: str, steps: int) -> float:
    folder.mkdir()
    run_module(["benchmarks.cookbook", "distill", model, str(folder), str(steps)], folder / "log")
    return _rate(folder / "times")


def _rate(times: Path) -> float:
    """Return the steps per second, without the first four and the last; there must be six."""
    request_times = [float(line) for line in times.read_text().splitlines()]
    steady = request_times[4:]
    return (len(steady) - 1) / (steady[-1] - steady[0])
