"""Base models: resolve a name to a Hugging Face directory and load it as a frozen model."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast, get_args

import httpx
import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from engine import smollm2, tiny
from engine.model_cache import ModelError, make_once
from objectives.errors import did_you_mean

DtypeName = Literal["float32", "bfloat16", "autocast-bf16"]
DTYPE_NAMES: tuple[DtypeName, ...] = get_args(DtypeName)

BUILTINS: dict[str, tuple[int, Callable[[Path], None]]] = {
    "tiny": (tiny.VERSION, tiny.write),
    "smollm2-135m": (smollm2.VERSION, smollm2.write),
}

# Hub names that clients may use for built-in models.
ALIASES = {"HuggingFaceTB/SmolLM2-135M-Instruct": "smollm2-135m"}

# No pickled weights: unpickling can run arbitrary code.
HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model")
HUB_DUPLICATES = ("*/*", "consolidated*")  # the same weights in other formats
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A base model in memory, frozen and in eval mode.

    Attributes:
        model: the causal LM; all parameters are frozen and `use_cache` is off by default.
        tokenizer: its tokenizer, for stop strings.
        name: the model's name in the API.
        path: its directory; `AutoTokenizer.from_pretrained(path)` works offline.
        device: the device of its weights.
        dtype: the dtype name passed to `load_model`.
        max_context: the maximum sequence length, in tokens.
        vocab_size: number of rows of the input embedding; valid token ids are smaller.
        eos_token_ids: tokens that end a sample by default.
    """

    model: PreTrainedModel = field(repr=False)
    tokenizer: PreTrainedTokenizerBase = field(repr=False)
    name: str
    path: Path
    device: torch.device
    dtype: DtypeName
    max_context: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]

    def autocast(self) -> torch.autocast:
        """Return the context of every forward pass: bfloat16 matrix products for "autocast-bf16"."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.dtype == "autocast-bf16")


def resolve_model(name: str, cache: Path) -> Path:
    """Resolve a model name to the absolute path of a Hugging Face model directory.

    Args:
        name: a built-in model, a directory with a config.json, or a name on the Hugging Face hub. If the hub
            cannot be reached, its local cache is used.
        cache: folder of the built-in models.

    Raises:
        ModelError: no model has this name, the model cannot be built or downloaded, its directory has no config.json,
            or the SDK would cut its path short.
    """
    if name in BUILTINS:
        version, write = BUILTINS[name]
        directory = _check_path(cache / f"{name}-{version}")
        return make_once(directory, write)
    try:
        directory = Path(name).expanduser()
    except RuntimeError as error:  # ~name of an unknown user
        raise ModelError(
            f"The home directory in {name!r} does not exist: use a model directory, {_alternatives(name)}"
        ) from error
    if directory.is_dir():
        if not (directory / "config.json").is_file():
            raise ModelError(
                f"{directory} has no config.json, so it is not a Hugging Face model directory: "
                "use a directory with config.json, *.safetensors and the tokenizer files."
            )
        return _check_path(directory)
    if directory.is_absolute() or name.startswith((".", "~")):
        raise ModelError(f"The directory {directory} does not exist: use a model directory, {_alternatives(name)}")
    return _check_path(_download(name))


def _alternatives(name: str) -> str:
    """Other kinds of names, and the built-in model with the most similar name, as the end of an error's sentence."""
    models = f"a Hugging Face hub name or one of the built-in models ({', '.join(BUILTINS)})"
    return models + (did_you_mean(name, BUILTINS) or ".")


def _check_path(directory: Path) -> Path:
    """Resolve a directory and reject paths that the SDK would cut short.

    The SDK uses the path as a model name, and cuts a name at a colon and at the second of exactly two slashes.
    """
    directory = directory.resolve()
    if ":" in str(directory) or str(directory).count("/") == 2:
        raise ModelError(
            f"The model directory {directory} has a colon or exactly two slashes in its path, and the Tinker SDK "
            "cuts such paths when it loads the tokenizer: move the directory, or the cache, elsewhere."
        )
    return directory


def _download(name: str) -> Path:
    try:
        return Path(snapshot_download(name, allow_patterns=list(HUB_FILES), ignore_patterns=list(HUB_DUPLICATES)))
    except HFValidationError as error:
        raise ModelError(
            f"{name!r} is not the name of a model that this machine can train: set TINKER_API_KEY if it is a model of "
            f"the hosted Tinker service, or use a directory, {_alternatives(name)}"
        ) from error
    except (httpx.HTTPError, OSError) as error:
        raise ModelError(
            f"Model {name!r} is not a directory, is not in the local hub cache and could not be downloaded "
            f"({_reason(error)}): set TINKER_API_KEY if it is a model of the hosted Tinker service, or use a "
            f"directory, {_alternatives(name)}"
        ) from error


def load_model(path: Path, device: str, dtype: DtypeName, name: str | None = None) -> LoadedModel:
    """Load a model directory for training adapters and for sampling.

    Attention is PyTorch's SDPA: on a CPU, equal inputs and thread counts give equal bits.

    Args:
        path: result of `resolve_model`.
        device: a torch device, such as "cpu" or "cuda:0".
        dtype: "float32"; "bfloat16" for bfloat16 weights; "autocast-bf16" for float32 weights with bfloat16
            matrix products (`LoadedModel.autocast`).
        name: the model's name in the API; defaults to its path.

    Raises:
        ModelError: the dtype is unknown, the device cannot be used, the directory has no tokenizer or lacks weights, or
            transformers cannot load it as a causal LM.
    """
    if dtype not in DTYPE_NAMES:
        raise ModelError(f"The dtype is {dtype!r}; use one of {', '.join(DTYPE_NAMES)}.")
    target = _device(device)
    if not any((path / file).is_file() for file in TOKENIZER_FILES):
        # Without these files transformers would create an empty tokenizer.
        raise ModelError(f"{path} has no tokenizer ({', '.join(TOKENIZER_FILES)}): add the model's tokenizer files.")
    try:
        model, loading = _read_model(path, torch.bfloat16 if dtype == "bfloat16" else torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises a dozen types of exceptions for malformed files
        raise ModelError(f"The model in {path} cannot be loaded: {_reason(error)}.") from error
    if missing := sorted({*loading["missing_keys"], *(key for key, *_ in loading["mismatched_keys"])}):
        # transformers would initialize these tensors randomly.
        raise ModelError(
            f"The weights in {path} lack {len(missing)} of the tensors that config.json requires "
            f"({missing[0]} is missing or has another shape): download the model again."
        )
    model.requires_grad_(False).eval()
    torch.nn.Module.to(model, target)  # pyright rejects `model.to(target)`, which transformers decorates
    model.config.use_cache = False
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        name=name or str(path),
        path=path,
        device=target,
        dtype=dtype,
        max_context=_max_context(model),
        vocab_size=cast(torch.nn.Embedding, model.get_input_embeddings()).num_embeddings,
        eos_token_ids=_eos_token_ids(model, tokenizer),
    )


def _read_model(path: Path, dtype: torch.dtype) -> tuple[PreTrainedModel, dict[str, Any]]:
    return cast(
        tuple[PreTrainedModel, dict[str, Any]],  # the return type with output_loading_info=True
        AutoModelForCausalLM.from_pretrained(
            path,
            dtype=dtype,
            attn_implementation="sdpa",
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,  # the loading info lists them
            output_loading_info=True,
        ),
    )


def _device(name: str) -> torch.device:
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise ModelError(
            f"The device {name!r} cannot be used ({_reason(error)}): use cpu, or cuda if PyTorch finds a GPU."
        ) from error


def _max_context(model: PreTrainedModel) -> int:
    """Return the model's context length; with `longrope`, the length up to which its short factors apply.

    transformers chooses short or long factors by the longest sequence of a batch. Beyond this length, a row would
    depend on the other rows of its batch, and its new keys would disagree with its cached ones.
    """
    config = model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope, *(value for value in rope.values() if isinstance(value, Mapping))]
    short = [kind["original_max_position_embeddings"] for kind in kinds if kind.get("rope_type") == "longrope"]
    return min([config.max_position_embeddings, *short])


def _eos_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Collect the end tokens of the tokenizer and the generation config, which often lists more."""
    listed = model.generation_config.eos_token_id if model.generation_config else None
    candidates = [*(listed if isinstance(listed, list) else [listed]), tokenizer.eos_token_id]
    return tuple(sorted({token for token in candidates if isinstance(token, int)}))


def _reason(error: BaseException) -> str:
    return textwrap.shorten(str(error) or type(error).__name__, width=250).rstrip(".")
