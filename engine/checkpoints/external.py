"""External weights: a checkpoint in peft's format for use elsewhere, optionally encrypted."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pyrage
from torch import Tensor

from engine.checkpoints.checkpoint import ADAPTER
from engine.checkpoints.store import pack
from engine.compute.lora import ALPHA, LoraSpec
from engine.errors import RequestError

_age: Any = pyrage  # a compiled module without type stubs

CONFIG = "adapter_config.json"
MAX_RECIPIENTS = 10


def external_files(
    weights: Mapping[str, Tensor], spec: LoraSpec, base_model: str, recipients: Sequence[str]
) -> dict[str, bytes]:
    """Build the files that ``peft.PeftModel.from_pretrained`` reads.

    Args:
        weights: the adapter's tensors by peft's names.
        recipients: at most `MAX_RECIPIENTS` public keys, of age (https://age-encryption.org/v1) or SSH. With
            recipients, every file is encrypted and named ``<name>.age``.

    Returns:
        Contents by file name.

    Raises:
        RequestError: a recipient is invalid, or there are too many.
    """
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": spec.rank,
        "lora_alpha": ALPHA,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": sorted({_module_name(tensor) for tensor in weights}),
    }
    files = {CONFIG: json.dumps(config, indent=1).encode(), ADAPTER: pack(weights)}
    if not recipients:
        return files
    if len(recipients) > MAX_RECIPIENTS:
        raise RequestError(f"There are {len(recipients)} age_encryption_recipients; use at most {MAX_RECIPIENTS}.")
    keys = [_recipient(text) for text in recipients]
    return {f"{name}.age": _age.encrypt(content, keys) for name, content in files.items()}


def _module_name(tensor: str) -> str:
    return tensor.removeprefix("base_model.model.").rpartition(".lora_")[0]


def _recipient(text: str) -> Any:
    kind = _age.ssh.Recipient if text.startswith("ssh-") else _age.x25519.Recipient
    try:
        return kind.from_str(text.strip())
    except _age.RecipientError as error:
        raise RequestError(
            f"{text[:80]!r} in age_encryption_recipients is not an age recipient ({error}): "
            "use a public key that starts with age1 or ssh-."
        ) from error
