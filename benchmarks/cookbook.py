"""Training loops of tinker-cookbook as processes: ``python -m benchmarks.cookbook METHOD ARGUMENT ...``.

`sft`, `dpo` and `rl` take config fields of the loop, as in `learning_rate=1e-4`. `distill` takes a model, a folder and
a number of steps.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from typing import Any

import chz


def sft(arguments: Sequence[str]) -> None:
    """Run the supervised loop."""
    from tinker_cookbook.supervised import train

    asyncio.run(train.main(chz.entrypoint(train.Config, argv=list(arguments))))


def dpo(arguments: Sequence[str]) -> None:
    """Run the DPO loop."""
    from tinker_cookbook.preference import train_dpo

    train_dpo.main(chz.entrypoint(train_dpo.Config, argv=list(arguments)))


def rl(arguments: Sequence[str]) -> None:
    """Run the RL loop and log the time of each step; the loop's own times leave out the work between steps."""
    from tinker_cookbook.rl import train
    from tinker_cookbook.utils import ml_log

    setup = ml_log.setup_logging

    def setup_logging(*args: Any, **kwargs: Any) -> ml_log.Logger:
        logger = setup(*args, **kwargs)
        log = logger.log_metrics

        def log_metrics(metrics: dict[str, Any], step: int | None = None) -> None:
            log({**metrics, "logged_at": time.time()}, step=step)

        logger.log_metrics = log_metrics
        return logger

    ml_log.setup_logging = setup_logging
    asyncio.run(train.main(chz.entrypoint(train.Config, argv=list(arguments))))


def distill(arguments: Sequence[str]) -> None:
    """Run the on-policy distillation loop."""
    from tinker_cookbook.distillation import train_on_policy
    from tinker_cookbook.distillation.datasets import DistillationDatasetConfig, TeacherConfig

    from benchmarks.distill_vs_cookbook import BATCH_SIZE, LEARNING_RATE, MAX_TOKENS, RANK, question_params
    from benchmarks.timed_data import TimedQuestionsBuilder

    model, folder, steps = arguments
    builder = TimedQuestionsBuilder(model_name_for_tokenizer=model, **question_params(f"{folder}/times"))
    dataset = DistillationDatasetConfig(
        dataset_builder=builder, teacher_config=TeacherConfig(base_model=model), groups_per_batch=BATCH_SIZE
    )
    config = train_on_policy.Config(
        learning_rate=LEARNING_RATE,
        dataset_configs=[dataset],
        model_name=model,
        recipe_name="bench",
        renderer_name="qwen3_instruct",
        max_tokens=MAX_TOKENS,
        lora_rank=RANK,
        log_path=folder,
        eval_every=0,
        save_every=0,
        max_steps=int(steps),
    )
    asyncio.run(train_on_policy.main(config))


if __name__ == "__main__":
    {"sft": sft, "dpo": dpo, "rl": rl, "distill": distill}[sys.argv[1]](sys.argv[2:])
