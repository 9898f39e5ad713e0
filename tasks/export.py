"""Export checkpoints as PEFT adapters or merged models, with tinker-cookbook."""

from __future__ import annotations

import json
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
from tasks.common.service_errors import service_errors
from tasks.common.task import retried_task, step_task
from tasks.reports.html import artifact_key, escape_markdown, markdown_table

_ADAPTER, _HEAD, _EMBEDDING = "adapter_model.safetensors", "lm_head", "model.embed_tokens.weight"
_MODEL_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]


@step_task(name="download")
def download_adapter(service: TinkerService, path: str, folder: Path) -> None:
    """Download the adapter of a checkpoint, in the service's format, into the new folder `folder`.

    Raises:
        ServiceError: the service does not have the checkpoint or could not send it.
    """
    from tinker_cookbook import weights  # imports transformers, which takes seconds

    with service.as_default(), service_errors(f"send {path}"):
        try:
            weights.download(tinker_path=path, output_dir=str(folder))
        except TinkerCookbookError as error:
            raise ServiceError(
                f"The Tinker service could not send {path} ({reason(error.__cause__ or error)}): choose a checkpoint "
                "that exists on the service; the local engine exports only training checkpoints (.../weights/...)."
            ) from error


@step_task(name="adapter")
def build_adapter(base_model: str, downloaded: Path, output: Path) -> None:
    """Write an adapter that peft can load onto the base model.

    Raises:
        ConfigError: the base model does not exist or does not match the adapter.
        StorageError: the output cannot be written.
    """
    from tinker_cookbook import weights

    base_folder(base_model)
    with _building(output) as folder:
        weights.build_lora_adapter(base_model=base_model, adapter_path=str(downloaded), output_path=str(folder))


@step_task(name="merge")
def build_merged(base_model: str, downloaded: Path, output: Path) -> None:
    """Merge the adapter into the base model, keep the data types of its weights, and write a model for transformers.

    Raises:
        ConfigError: the base model does not exist or does not match the adapter.
        StorageError: the output cannot be written.
    """
    from tinker_cookbook import weights

    original = base_folder(base_model)
    with _building(output) as folder, _untied(original, downloaded) as base:
        weights.build_hf_model(base_model=str(base), adapter_path=str(downloaded), output_path=str(folder))


def base_folder(base_model: str) -> Path:
    """Return the folder of a base model; download it if `base_model` is a name on the Hugging Face hub.

    Raises:
        ConfigError: `base_model` is neither a folder nor a name on the hub.
    """
    if Path(base_model).is_dir():
        if not (Path(base_model) / "config.json").is_file():
            raise ConfigError(
                f"The base model {base_model} is a directory without a config.json: set base_model to the directory of "
                "a model, with config.json and *.safetensors."
            )
        return Path(base_model)
    try:
        return Path(snapshot_download(base_model, allow_patterns=_MODEL_FILES))
    except (HFValidationError, httpx.HTTPError, OSError) as error:
        raise ConfigError(
            f"The base model {base_model!r} is not a directory and could not be downloaded ({reason(error)}): set "
            "base_model to its Hugging Face name, or to a directory with its config.json and *.safetensors."
        ) from error


@contextmanager
def _building(output: Path) -> Iterator[Path]:
    """Yield a temporary folder to build in; rename it to the output if the block succeeds."""
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}-") as temporary:
            folder = Path(temporary) / output.name
            yield folder
            folder.rename(output)
    except (ConfigError, StorageError):
        raise
    except (TinkerCookbookError, ValueError, KeyError) as error:
        raise ConfigError(
            f"The export failed ({type(error).__name__}: {reason(error)}): set base_model to the Hugging "
            "Face name or directory of the model that the checkpoint was trained from."
        ) from error
    except OSError as error:
        raise storage_error("build", output, error) from error


@retried_task(name="report")
def describe_export(checkpoint: str, path: str, base_model: str, folders: Mapping[str, str]) -> None:
    """Create a Prefect artifact that lists the exported folders."""
    rows = [("checkpoint", checkpoint), ("path", path), ("base model", base_model), *folders.items()]
    if flow_run.get_id():
        create_markdown_artifact(
            markdown_table(("", ""), rows),
            artifact_key("export", checkpoint),
            f"Export of {escape_markdown(checkpoint)}",
        )


@contextmanager
def _untied(base: Path, downloaded: Path) -> Iterator[Path]:
    """Yield the base model's folder, or a copy with an untied output layer if the adapter changes a tied one.

    Merging the adapter into tied weights would change the embedding as well.
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
    """Add an output layer to the model's files, with the weights of the embedding."""
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
    raise ConfigError(f"The base model has no {_EMBEDDING} in its *.safetensors: merge the adapter with another tool.")
