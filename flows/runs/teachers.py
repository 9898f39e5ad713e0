"""Frozen models of a run: its teachers, recorded when the run starts, and the reference of its terms."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import tinker
from tinker_cookbook.tokenizer_utils import Tokenizer

from blocks.errors import ConfigError
from flows.config.base import SERVICE_PATH
from flows.config.distill import TeacherConfig
from flows.config.dpo import START
from flows.config.train import BASE_MODEL, TrainConfig
from flows.monitoring.run_tags import note_warning
from flows.runs.blocks import storage_of
from flows.runs.checkpoints.checkpoint_refs import find_checkpoint
from flows.runs.run import Run
from tasks.common.datum_cache import load_cache
from tasks.common.prompt_scores import supports_last_n
from tasks.common.sampling import open_sampler
from tasks.common.service_errors import service_errors
from tasks.common.tokenizers import encode_alike
from tasks.training.checkpoints import resumable
from tasks.training.reference import REFERENCE_NAME, Reference
from tasks.training.teacher import Teacher

TEACHERS = "teachers.json"


def open_teachers(run: Run, config: TrainConfig, teachers: Sequence[TeacherConfig]) -> list[Teacher]:
    """Open sampling clients of the teachers, one for each distinct set of weights.

    Raises:
        ConfigError: A checkpoint does not exist, or its tokenizer differs from the student's.
        ServiceError: The service does not have the weights.
    """
    weights = _resolve(run, config, teachers)
    tokenizer = run.client.get_tokenizer()
    clients = {
        (model, path): _open(run, model, path, tokenizer if model != config.model else None)
        for model, path in dict.fromkeys(weights)
    }
    can_score_last_n = _can_score_last_n(run, config, clients[weights[0]].sampler)
    return [replace(clients[key], can_score_last_n=can_score_last_n) for key in weights]


def _can_score_last_n(run: Run, config: TrainConfig, sampler: tinker.SamplingClient) -> bool:
    """Return whether reference and teachers score only the ends of sequences; warn if the service cannot."""
    if config.prompt_logprobs_last_n == "off":
        return False
    if supports_last_n(sampler):
        return True
    text = (
        "The service does not know prompt_logprobs_last_n, so reference and teachers score whole sequences: set "
        "prompt_logprobs_last_n to off, or update the service."
    )
    note_warning(run.log, "prompt_logprobs_last_n", text)
    return False


def _resolve(run: Run, config: TrainConfig, teachers: Sequence[TeacherConfig]) -> list[tuple[str, str]]:
    """Return the model and path of each teacher, as recorded at the start of the run."""
    content = run.directory.read_bytes(TEACHERS)
    # Without a checkpoint, the run starts over and looks the names up again.
    resolved: dict[str, list[str]] = json.loads(content) if content and run.start else {}
    for teacher in teachers:
        key = f"{teacher.model} {teacher.checkpoint}"
        if key not in resolved:
            checkpoint = find_checkpoint(teacher.checkpoint, storage_of(config))
            resolved[key] = [teacher.model or checkpoint.model or config.model, checkpoint.path]
    run.directory.write_bytes(TEACHERS, json.dumps(resolved, indent=2).encode())
    return [(model, path) for model, path in (resolved[f"{t.model} {t.checkpoint}"] for t in teachers)]


def _open(run: Run, model: str, path: str, expected: Tokenizer | None) -> Teacher:
    """Open the sampling client of a teacher; check its tokenizer against `expected` unless that is None."""
    sampler, tokenizer = open_sampler(run.session, path, model)
    if expected is not None and not encode_alike(tokenizer, expected):
        raise ConfigError(
            f"The teacher {model} has another tokenizer than the trained model: use a teacher of the same model "
            "family, or fine-tune on its completions as text with sft."
        )
    run.meter.watch(sampler)
    return Teacher(sampler, path or model)


def open_saved_teacher(run: Run, model: str, path: str) -> Teacher:
    """Open weights that the run has saved, to use them as a teacher.

    Raises:
        ServiceError: The service does not have the weights.
    """
    return _open(run, model, path, None)


def open_reference(run: Run, config: TrainConfig, *, uses_cache: bool = True) -> Reference:
    """Open the reference model, with the logprobs that the run has cached.

    Args:
        uses_cache: True to cache logprobs; False for sampled data, which does not repeat.

    Raises:
        ConfigError: The reference is a model that the service does not have, or its tokenizer differs from the model's.
        ServiceError: The service does not have the checkpoint or does not respond.
    """
    name = _started_from(run) if config.reference == START else config.reference
    path = name if name.startswith(SERVICE_PATH) else ""
    model = _reference_model(run, config, name)

    def open_trainer() -> tinker.TrainingClient:
        with service_errors(f"open the reference {name}"):
            if not path:
                # The initial adapter adds nothing to the base model.
                return run.session.create_lora_training_client(model, rank=1).result()
            return run.session.create_training_client_from_state(path).result()

    if model != config.model:
        sampler, tokenizer = open_sampler(run.session, path, model)
        if not encode_alike(tokenizer, run.client.get_tokenizer()):
            raise ConfigError(
                f"reference is {config.reference!r}, of the model {model}, which has another tokenizer than "
                f"{config.model}: use a reference with the same tokenizer."
            )
    else:
        with service_errors(f"open the reference {name}"):
            if not path:
                sampler = run.session.create_sampling_client(base_model=model).result()
            elif "/sampler_weights/" in path:
                sampler = run.session.create_sampling_client(model_path=path).result()
            else:
                sampler = open_trainer().save_weights_and_get_sampling_client().result()
    can_score_last_n = _can_score_last_n(run, config, sampler)
    reference = Reference(
        sampler, open_trainer, name, model=model, uses_cache=uses_cache, can_score_last_n=can_score_last_n
    )
    load_cache(reference.cache, run.directory, REFERENCE_NAME)
    return reference


def base_model_of(session: tinker.ServiceClient, path: str) -> str:
    """Return the base model of a reference's weights.

    Raises:
        ServiceError: The service does not have the weights or does not respond.
    """
    with service_errors(f"open the reference {path}"):
        return tinker.RestClient(session.holder).get_weights_info_by_tinker_path(path).result().base_model


def _reference_model(run: Run, config: TrainConfig, name: str) -> str:
    """Return the base model of a reference."""
    if name == BASE_MODEL:
        return config.model
    if name.startswith(SERVICE_PATH):
        return base_model_of(run.session, name)
    with service_errors("list the models of the service"):
        capabilities = tinker.RestClient(run.session.holder).get_server_capabilities().result()
    models = [model.model_name for model in capabilities.supported_models]
    if name not in models:
        raise ConfigError(
            f"reference is {name!r}, which is no model of the service ({', '.join(sorted(filter(None, models)))}): "
            "use base, a tinker:// path, or one of these models."
        )
    return name


def _started_from(run: Run) -> str:
    """Return the weights that the run started from; for a fork, its parent's checkpoint, also after a restart."""
    records = resumable(run.directory)
    first = records[-1] if records else run.start
    return first.extra["parent"]["state_path"] if first and first.has("parent") else BASE_MODEL
