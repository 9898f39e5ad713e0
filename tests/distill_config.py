"""Config fields of small distillation runs on the tiny model, and a teacher."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, NamedTuple

import tinker
from run_config import run_fields
from tinker import types
from tinker_cookbook.renderers import get_renderer

from flows.config.distill import QUESTIONS
from tasks.training.teacher import hard_datum

END = 258


def distill_fields(folder: Path, run_name: str, tracking: str, base_url: str = "local") -> dict[str, Any]:
    """Return a run of two steps of four prompts."""
    return run_fields(folder, run_name, tracking, base_url) | {
        "lora_rank": 8,
        "learning_rate": 1e-2,
        "lr_schedule": "constant",
        "num_epochs": 1000,
        "num_steps": 2,
        "eval_every": 2,
        "checkpoint_every": 2,
        "batch_size": 4,
        "rollout": {"max_tokens": 12},
    }


def questions(folder: Path, num_train: int = 32, num_test: int = 16) -> dict[str, Any]:
    """Write question files; half of the questions ask for the letter a, half for b. Return config fields."""
    numbers = {"train": range(num_train), "test": range(40, 40 + num_test)}
    for name, part_numbers in numbers.items():
        rows = [json.dumps({"question": f"Say {'ab'[number % 2]}.{number // 2}"}) for number in part_numbers]
        (folder / f"{name}.jsonl").write_text("\n".join(rows))
    return {"path": str(folder / "train.jsonl"), "test_path": str(folder / "test.jsonl")}


def environment(folder: Path, num_train: int = 32, **params: Any) -> dict[str, Any]:
    return {"builder": QUESTIONS, "params": questions(folder, num_train) | {"batch_size": 4, **params}}


class Weights(NamedTuple):
    """Paths of trained weights: training state and sampler weights."""

    state: str
    sampler: str


def make_teacher(base_url: str, prompt: str = "", num_steps: int = 40) -> Weights:
    """Train weights that complete a prompt with eight letters, three quarters of them the requested letter.

    Args:
        prompt: System message; without it, the completion consists of the letters c and d.
    """
    service = tinker.ServiceClient(base_url=base_url)
    client = service.create_lora_training_client("tiny", rank=8, seed=7).result()
    renderer = get_renderer("qwen3_instruct", client.get_tokenizer())
    generator = random.Random(0)
    examples = [(prompt, "a", "aaab"), (prompt, "b", "abbb")]
    examples += [("", "a", "ccdd"), ("", "b", "ccdd")] if prompt else []
    for _ in range(num_steps):
        data = []
        for system, letter, letters in examples * 8:
            messages = [{"role": "system", "content": system}] if system else []
            messages.append({"role": "user", "content": f"Say {letter}.{generator.randrange(60)}"})
            before = renderer.build_generation_prompt(messages).to_ints()  # type: ignore[arg-type]
            completion = [*(ord(generator.choice(letters)) for _ in range(8)), END]
            data.append(hard_datum([*before, *completion], [0.0] * len(before) + [1.0] * len(completion)))
        pending = client.forward_backward(data, "cross_entropy")
        client.optim_step(types.AdamParams(learning_rate=2e-2)).result()
        pending.result()
    state = client.save_state("teacher").result().path
    return Weights(state, client.save_weights_for_sampler("teacher").result().path)
