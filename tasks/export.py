"""Weights for elsewhere: a checkpoint as a PEFT adapter, or merged into its base model, by tinker-cookbook's tools."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError
from prefect.artifacts import create_markdown_artifact
from prefect.runtime import flow_run
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tinker_cookbook.exceptions import TinkerCookbookError

from blocks.errors import ConfigError, ServiceError, StorageError, reason, storage_error
from blocks.service import TinkerService
from tasks.options import retried_task, step_task
from tasks.page import artifact_key, markdown
from tasks.service_errors import service_errors

_ADAPTER, _HEAD, _EMBEDDING = "adapter_model.safetensors", "lm_head", "model.embed_tokens.weight"
_KEY = "TINKER_API_KEY"
_MODEL_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]


@step_task(name="download")
def download_adapter(service: TinkerService, path: str, folder: Path) -> None:
    """Fetch the adapter of a checkpoint into a new folder, as the service has it.

    Raises:
        ServiceError: the service has no such checkpoint, or could not hand it over.
    """
    from tinker_cookbook import weights  # with transformers, which takes seconds

    with _key_of(service), service_errors(f"hand over {path}"):
        try:
            weights.download(tinker_path=path, output_dir=str(folder), base_url=service.resolved_url)
        except TinkerCookbookError as error:
            raise ServiceError(
                f"The Tinker service could not hand over {path} ({reason(error.__cause__ or error)}): name one "
                "that it has; the local engine hands over checkpoints that training can go on from."
            ) from error


@step_task(name="adapter")
def build_adapter(base_model: str, downloaded: Path, output: Path) -> None:
    """Write an adapter that peft loads onto the base model.

    Raises:
        ConfigError: the base model is not there, or the adapter is none for it.
        StorageError: the output cannot be written, or is there already.
    """
    from tinker_cookbook import weights

    base_folder(base_model)
    with _building(output) as folder:
        weights.build_lora_adapter(base_model=base_model, adapter_path=str(downloaded), output_path=str(folder))


@step_task(name="merge")
def build_merged(base_model: str, downloaded: Path, output: Path) -> None:
    """Write the base model with the adapter added to its weights, in their own data types, as transformers loads it.

    Raises:
        ConfigError: the base model is not there, or the adapter is none for it.
        StorageError: the output cannot be written, or is there already.
    """
    from tinker_cookbook import weights

    with _building(output) as folder, _untied(base_folder(base_model), downloaded) as base:
        weights.build_hf_model(base_model=str(base), adapter_path=str(downloaded), output_path=str(folder))


def base_folder(base_model: str) -> Path:
    """The directory of a base model, downloaded where it is a name on the Hugging Face hub.

    Raises:
        ConfigError: there is no such directory or name.
    """
    if Path(base_model).is_dir():
        return Path(base_model)
    try:
        return Path(snapshot_download(base_model, allow_patterns=_MODEL_FILES))
    except (HFValidationError, httpx.HTTPError, OSError) as error:
        raise ConfigError(
            f"The base model {base_model!r} is no directory and could not be downloaded ({reason(error)}): set "
            "base_model to its Hugging Face name, or to a directory with its config.json and *.safetensors."
        ) from error


@contextmanager
def _key_of(service: TinkerService) -> Iterator[None]:
    """The service's key in the environment, the only place where the download looks for it."""
    before = os.environ.get(_KEY)
    if service.api_key:
        os.environ[_KEY] = service.api_key.get_secret_value()
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(_KEY, None)
        else:
            os.environ[_KEY] = before


@contextmanager
def _building(output: Path) -> Iterator[Path]:
    """A folder beside the output that becomes it as a whole, or not at all."""
    if output.exists():
        raise StorageError(f"{output} is there already: choose another output, or remove it.")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}-") as temporary:
            folder = Path(temporary) / output.name
            yield folder
            folder.rename(output)
    except (TinkerCookbookError, ValueError, KeyError) as error:
        raise ConfigError(
            f"The weights could not be built ({type(error).__name__}: {reason(error)}): set base_model to the Hugging "
            "Face name or directory of the model that the checkpoint was trained from."
        ) from error
    except OSError as error:
        raise storage_error("build", output, error) from error


@retried_task(name="report")
def describe_export(checkpoint: str, path: str, base_model: str, folders: Mapping[str, str]) -> None:
    """Say in Prefect what lies where."""
    rows = [("checkpoint", checkpoint), ("path", path), ("base model", base_model), *folders.items()]
    if flow_run.get_id():
        create_markdown_artifact(
            markdown(("", ""), rows), artifact_key("export", checkpoint), f"Export of {checkpoint}"
        )


@contextmanager
def _untied(base: Path, downloaded: Path) -> Iterator[Path]:
    """The base model; with a copy of the embedding for output layer where the adapter changes a shared one.

    Merged into the shared weights, the change would be one of the embedding as well.
    """
    with safe_open(downloaded / _ADAPTER, framework="pt") as adapter:
        changes_head = any(_HEAD in key or "unembed_tokens" in key for key in adapter.keys())  # noqa: SIM118
    config = json.loads((base / "config.json").read_text())
    if not (changes_head and config.get("tie_word_embeddings")):
        yield base
        return
    with tempfile.TemporaryDirectory(prefix="tinker-flows-untied-") as temporary:
        copy = Path(temporary)
        shutil.copytree(base, copy, dirs_exist_ok=True)
        (copy / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}, indent=2))
        _add_head(copy)
        yield copy


def _add_head(folder: Path) -> None:
    """Give a model's files an output layer of its own, equal to the embedding."""
    for shard in sorted(folder.glob("*.safetensors")):
        tensors = load_file(shard)
        if _EMBEDDING in tensors:
            save_file(tensors | {f"{_HEAD}.weight": tensors[_EMBEDDING].clone()}, shard, {"format": "pt"})
            index = folder / "model.safetensors.index.json"
            if index.is_file():
                content = json.loads(index.read_text())
                content["weight_map"][f"{_HEAD}.weight"] = shard.name
                index.write_text(json.dumps(content, indent=2))
            return
    raise ConfigError(f"The base model has no {_EMBEDDING} in its *.safetensors: merge it with other tools.")
