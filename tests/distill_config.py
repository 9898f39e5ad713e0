"""Small distillation runs on the tiny model, as the fields of their configs, and a teacher for them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, NamedTuple

import tinker
from run_config import run_fields
from tinker import types
from tinker_cookbook.renderers import get_renderer

from flows.distill_config import QUESTIONS
from tasks.teacher import hard_datum

END = 258


def distill_fields(folder: Path, run_name: str, tracking: str, base_url: str = "local") -> dict[str, Any]:
    """Two steps of four questions."""
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
    """Files of questions, half for an answer of many a and half for one of many b, as fields of a config."""
    numbers = {"train": range(num_train), "test": range(40, 40 + num_test)}
    for name, range_of in numbers.items():
        rows = [json.dumps({"question": f"Say {'ab'[number % 2]}.{number // 2}"}) for number in range_of]
        (folder / f"{name}.jsonl").write_text("\n".join(rows))
    return {"path": str(folder / "train.jsonl"), "test_path": str(folder / "test.jsonl")}


def environment(folder: Path, num_train: int = 32, **params: Any) -> dict[str, Any]:
    return {"builder": QUESTIONS, "params": questions(folder, num_train) | {"batch_size": 4, **params}}


class Weights(NamedTuple):
    """Where trained weights are: to go on from, and to sample from."""

    state: str
    sampler: str


def make_teacher(base_url: str, prompt: str = "", num_steps: int = 40) -> Weights:
    """Weights that answer with eight letters, three of four of which are the one that is asked for.

    Args:
        prompt: a system message without which they answer with the letters c and d, whatever is asked.
    """
    service = tinker.ServiceClient(base_url=base_url)
    client = service.create_lora_training_client("tiny", rank=8, seed=7).result()
    renderer = get_renderer("qwen3_instruct", client.get_tokenizer())
    generator = random.Random(0)
    lessons = [(prompt, "a", "aaab"), (prompt, "b", "abbb")]
    lessons += [("", "a", "ccdd"), ("", "b", "ccdd")] if prompt else []
    for _ in range(num_steps):
        data = []
        for system, asked, letters in lessons * 8:
            messages = [{"role": "system", "content": system}] if system else []
            messages.append({"role": "user", "content": f"Say {asked}.{generator.randrange(60)}"})
            before = renderer.build_generation_prompt(messages).to_ints()  # type: ignore[arg-type]
            answer = [*(ord(generator.choice(letters)) for _ in range(8)), END]
            data.append(hard_datum([*before, *answer], [0.0] * len(before) + [1.0] * len(answer)))
        pending = client.forward_backward(data, "cross_entropy")
        client.optim_step(types.AdamParams(learning_rate=2e-2)).result()
        pending.result()
    state = client.save_state("teacher").result().path
    return Weights(state, client.save_weights_for_sampler("teacher").result().path)
