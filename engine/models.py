"""Base models: from a name to a Hugging Face directory, from there to a frozen model ready for adapters."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
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

DtypeName = Literal["float32", "bfloat16", "autocast-bf16"]
DTYPE_NAMES: tuple[DtypeName, ...] = get_args(DtypeName)

BUILTINS: dict[str, tuple[int, Callable[[Path], None]]] = {
    "tiny": (tiny.VERSION, tiny.write),
    "smollm2-135m": (smollm2.VERSION, smollm2.write),
}

# Names on the hub that clients may use for built-in models.
ALIASES = {"HuggingFaceTB/SmolLM2-135M-Instruct": "smollm2-135m"}

# No pickled weights: unpickling runs whatever the file says.
HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model")
HUB_DOUBLES = ("*/*", "consolidated*")  # the same weights in other formats
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A base model in memory, frozen and in eval mode.

    Attributes:
        model: the causal LM; no parameter of it wants a gradient and `use_cache` is off unless asked for.
        tokenizer: its tokenizer, for stop strings.
        name: what clients call it.
        path: its directory; `AutoTokenizer.from_pretrained(path)` works offline.
        device: where its weights are.
        dtype: the name it was loaded with.
        max_context: the longest sequence, in tokens.
        vocab_size: rows of the input embedding; valid token ids are below it.
        eos_token_ids: what ends a sample unless the client says otherwise.
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
        """The context every forward pass runs in: bfloat16 matrix products for "autocast-bf16"."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.dtype == "autocast-bf16")


def resolve_model(name: str, cache: Path) -> Path:
    """Turn a model name into the absolute path of a Hugging Face model directory.

    Args:
        name: a built-in model, else a directory with a config.json, else a name on the Hugging Face hub
            (looked up in the hub's own local cache when the hub cannot be reached).
        cache: where built-in models are kept once made.

    Raises:
        ModelError: nothing by that name, or a path that the SDK cannot pass on.
    """
    if name in BUILTINS:
        version, write = BUILTINS[name]
        directory = _addressable(cache / f"{name}-{version}")
        return make_once(directory, write)
    directory = Path(name).expanduser()
    if directory.is_dir():
        if not (directory / "config.json").is_file():
            raise ModelError(
                f"{directory} has no config.json, so it is not a Hugging Face model: "
                "give the directory that holds config.json, the *.safetensors and the tokenizer files."
            )
        return _addressable(directory)
    if directory.is_absolute() or name.startswith((".", "~")):
        raise ModelError(f"There is no directory {directory}: give a model directory, {_alternatives()}.")
    return _addressable(_from_hub(name))


def _alternatives() -> str:
    return f"a Hugging Face hub name or one of the built-in models ({', '.join(BUILTINS)})"


def _addressable(directory: Path) -> Path:
    """The SDK takes the path for a model name, which it cuts at ":" and at the second of just two slashes."""
    directory = directory.resolve()
    if ":" in str(directory) or str(directory).count("/") == 2:
        raise ModelError(
            f"The model directory {directory} has a colon or exactly two slashes in its path, which the "
            "Tinker SDK cuts when it looks for the tokenizer: move the directory, or the cache, elsewhere."
        )
    return directory


def _from_hub(name: str) -> Path:
    try:
        return Path(snapshot_download(name, allow_patterns=list(HUB_FILES), ignore_patterns=list(HUB_DOUBLES)))
    except HFValidationError as error:
        raise ModelError(f"{name!r} is not a model name: give a directory, {_alternatives()}.") from error
    except (httpx.HTTPError, OSError) as error:
        raise ModelError(
            f"Model {name!r} is no directory, not in the local hub cache and could not be downloaded "
            f"({_reason(error)}): give a directory, {_alternatives()}."
        ) from error


def load_model(path: Path, device: str, dtype: DtypeName, name: str | None = None) -> LoadedModel:
    """Load a model directory for training adapters and for sampling.

    Attention is PyTorch's SDPA: on a CPU the same inputs and threads give the same bits.

    Args:
        path: as `resolve_model` returned it.
        device: a torch device, such as "cpu" or "cuda:0".
        dtype: "float32"; "bfloat16" for the weights; "autocast-bf16" for float32 weights whose products run
            in bfloat16, in `LoadedModel.autocast()`.
        name: what clients call the model; its path unless given.

    Raises:
        ModelError: the directory is not a causal LM that transformers can load.
    """
    if dtype not in DTYPE_NAMES:
        raise ModelError(f"The dtype is {dtype!r}, it must be one of {', '.join(DTYPE_NAMES)}.")
    target = _device(device)
    if not any((path / file).is_file() for file in TOKENIZER_FILES):
        # transformers would make up an empty one.
        raise ModelError(f"{path} has no tokenizer ({', '.join(TOKENIZER_FILES)}): add the model's tokenizer files.")
    try:
        model, loading = _read(path, torch.bfloat16 if dtype == "bfloat16" else torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # what transformers makes of a malformed file is of a dozen kinds
        raise ModelError(f"The model in {path} cannot be loaded: {_reason(error)}.") from error
    if absent := sorted({*loading["missing_keys"], *(key for key, *_ in loading["mismatched_keys"])}):
        # transformers would go on with random numbers in their place.
        raise ModelError(
            f"The weights in {path} lack {len(absent)} of the tensors that its config.json asks for "
            f"({absent[0]} is missing or has another shape): fetch the model anew."
        )
    torch.nn.Module.to(model.requires_grad_(False).eval(), target)
    model.config.use_cache = False
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        name=name or str(path),
        path=path,
        device=target,
        dtype=dtype,
        max_context=model.config.get_text_config().max_position_embeddings,
        vocab_size=cast(torch.nn.Embedding, model.get_input_embeddings()).num_embeddings,
        eos_token_ids=_eos_token_ids(model, tokenizer),
    )


def _read(path: Path, dtype: torch.dtype) -> tuple[PreTrainedModel, dict[str, Any]]:
    return cast(
        tuple[PreTrainedModel, dict[str, Any]],  # as it is with output_loading_info
        AutoModelForCausalLM.from_pretrained(
            path,
            dtype=dtype,
            attn_implementation="sdpa",
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,  # they are in the loading info
            output_loading_info=True,
        ),
    )


def _device(name: str) -> torch.device:
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise ModelError(
            f"The device {name!r} cannot be used ({_reason(error)}): give cpu, or cuda where PyTorch sees a GPU."
        ) from error


def _eos_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Chat models often end at more ids than the tokenizer names: the generation config lists them."""
    listed = model.generation_config.eos_token_id if model.generation_config else None
    candidates = [*(listed if isinstance(listed, list) else [listed]), tokenizer.eos_token_id]
    return tuple(sorted({token for token in candidates if isinstance(token, int)}))


def _reason(error: BaseException) -> str:
    return textwrap.shorten(str(error) or type(error).__name__, width=250).rstrip(".")
