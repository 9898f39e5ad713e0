"""The teachers of a run: which weights they are is written down when it begins, and stays so."""

from __future__ import annotations

import json
from collections.abc import Sequence

from pydantic import Field
from tinker_cookbook.tokenizer_utils import Tokenizer

from blocks.errors import ConfigError
from flows.blocks_of import storage_of
from flows.config import Config
from flows.named_checkpoint import BASE, CHECKPOINT, WHAT, find_checkpoint
from flows.run import Run
from flows.train_config import TrainConfig
from tasks.teacher import Teacher
from tasks.weights import open_sampler

TEACHERS = "teachers.json"

# Text by which two tokenizers are told apart.
_PROBE = "The answer is 1234.5 €;\n\tdef f(x): return x  # naïve 漢字 Ünïcode <|im_end|>"


class TeacherConfig(Config):
    """A model to learn from. It needs the tokenizer of the one that is trained."""

    model: str = Field(
        default="",
        title="Model",
        description="Base model by the service's name; empty: that of the checkpoint's run, or the trained one.",
    )
    checkpoint: str = Field(
        default=BASE,
        title="Checkpoint",
        description=f"{WHAT} Which weights a name leads to is settled when the run begins.",
        pattern=CHECKPOINT,
    )


def open_teachers(run: Run, config: TrainConfig, teachers: Sequence[TeacherConfig]) -> list[Teacher]:
    """Clients that sample from the teachers, each set of weights once.

    Raises:
        ConfigError: there is no such checkpoint, or it has another tokenizer.
        ServiceError: the service does not have it.
    """
    settled = _settle(run, config, teachers)
    tokenizer = run.client.get_tokenizer()
    opened = {
        (model, path): _open(run, model, path, tokenizer if model != config.model else None)
        for model, path in dict.fromkeys(settled)
    }
    return [opened[each] for each in settled]


def _settle(run: Run, config: TrainConfig, teachers: Sequence[TeacherConfig]) -> list[tuple[str, str]]:
    """Model and path of each, as the run first found them."""
    written = run.directory.read_bytes(TEACHERS)
    settled: dict[str, list[str]] = json.loads(written) if written and run.start else {}
    for teacher in teachers:
        key = f"{teacher.model} {teacher.checkpoint}"
        if key not in settled:
            found = find_checkpoint(teacher.checkpoint, storage_of(config))
            settled[key] = [teacher.model or found.model or config.model, found.path]
    run.directory.write_bytes(TEACHERS, json.dumps(settled, indent=2).encode())
    return [(model, path) for model, path in (settled[f"{each.model} {each.checkpoint}"] for each in teachers)]


def _open(run: Run, model: str, path: str, expected: Tokenizer | None) -> Teacher:
    sampler, tokenizer = open_sampler(run.session, path, model)
    if expected is not None and tokenizer.encode(_PROBE) != expected.encode(_PROBE):
        raise ConfigError(
            f"The teacher {model} has another tokenizer than the model that is trained, and tokens are what is "
            "distilled: take a teacher of the same family, or fine-tune on its answers as text with sft."
        )
    return Teacher(sampler, path or model)
