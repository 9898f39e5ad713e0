"""``python -m benchmarks.cookbook_distill MODEL FOLDER STEPS``: tinker-cookbook's on-policy distillation, by itself."""

from __future__ import annotations

import asyncio
import sys

from tinker_cookbook.distillation import train_on_policy
from tinker_cookbook.distillation.datasets import DistillationDatasetConfig, TeacherConfig

from benchmarks.distill_vs_cookbook import BATCH_SIZE, LEARNING_RATE, MAX_TOKENS, RANK, question_params
from benchmarks.timed_questions import TimedQuestionsBuilder


def main(model: str, folder: str, steps: str) -> None:
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
    main(*sys.argv[1:])
