"""Chat formats, system prompts and prompt templates of a run in MLflow's prompt registry."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from mlflow import MlflowClient
from mlflow.entities.model_registry import PromptVersion
from mlflow.exceptions import MlflowException
from tinker_cookbook.renderers import Message, get_renderer
from tinker_cookbook.tokenizer_utils import Tokenizer

from blocks.errors import reason
from blocks.mlflow_internals import TraceTagKey
from flows.config.base import RunConfig
from flows.config.loader import field_values, renderer_names
from flows.monitoring.run_tags import note_warning
from tasks.training.tracking.metrics import MetricsLog

# Config fields with a system prompt or a template of a prompt.
_PROMPT_FIELDS = ("system_prompt", "prompt", "teacher_prompt", "shown")  # `shown`: teacher_prompt in release 0.1
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_.-]+")


def register_prompts(log: MetricsLog, config: RunConfig, tokenizer: Tokenizer) -> None:
    """Register the renderers, system prompts and prompt templates of a config, and link them to the MLflow run.

    A text that the registry already has as a version adds no version.
    """
    templates = {**_renderers(log, config, tokenizer), **_prompt_texts(config)}
    if not templates:
        text = "register_prompts has no effect: the config has no prompt text, and no renderer that can be built."
        note_warning(log, "prompts", text)
        return
    try:
        log.check_writer()
        versions = [_register(log.client, name, template) for name, template in templates.items()]
        linked = [{"name": version.name, "version": str(version.version)} for version in versions]
        # MLflow's client would link them in the tracking store of the process, not in the store of the run.
        log.tag(TraceTagKey.LINKED_PROMPTS, json.dumps(linked))
    except MlflowException as error:
        note_warning(log, "prompts", f"MLflow did not store the prompts of the run ({reason(error)}).")


def _renderers(log: MetricsLog, config: RunConfig, tokenizer: Tokenizer) -> dict[str, str]:
    """Return, by name in MLflow's prompt registry, the text that each renderer makes of one user message."""
    message = Message(role="user", content="{{prompt}}")
    templates: dict[str, str] = {}
    for renderer in renderer_names(config):
        name = _NOT_IN_NAMES.sub("-", renderer)
        try:
            prompt = get_renderer(renderer, tokenizer).build_generation_prompt([message])
        except Exception as error:  # noqa: BLE001  # a renderer of the user may raise anything
            note_warning(log, f"prompts.{name}", f"The renderer {renderer} was not registered ({reason(error)}).")
        else:
            templates[f"renderer-{name}"] = str(tokenizer.decode(prompt.to_ints()))
    return templates


def _prompt_texts(config: RunConfig) -> dict[str, str]:
    """Return system prompts and templates by name in MLflow's prompt registry, equal for all runs of an experiment."""
    return {_NOT_IN_NAMES.sub("-", f"{config.experiment}-{name}"): text for name, text in _texts(config)}


def _texts(config: RunConfig) -> Iterator[tuple[str, str]]:
    for field in _PROMPT_FIELDS:
        texts = dict.fromkeys(
            text for text in field_values(config.model_dump(), field) if text and isinstance(text, str)
        )
        for number, text in enumerate(texts):
            yield (f"{field}-{number + 1}" if number else field), text


def _register(client: MlflowClient, name: str, template: str) -> PromptVersion:
    # Not `load_prompt`, which links the prompt to an experiment of the process's global store.
    known = client.search_prompt_versions(name) if client.get_prompt(name) else []
    return next((version for version in known if version.template == template), None) or client.register_prompt(
        name, template
    )
