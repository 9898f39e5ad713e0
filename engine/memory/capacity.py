"""Limits of an engine: tokens per pass, and bytes for caches and adapters.

A limit that the settings leave open depends on the model and on the memory of the device.
"""

from __future__ import annotations

import os

import torch

from engine.compute.base import BaseModel
from engine.service.settings import Settings

SMALL_MODEL = 10_000_000  # parameters
MAX_PASS_TOKENS = 16_384  # on a GPU: other clients wait for the end of a pass
_CPU_CACHE_BYTES = 2 * 2**30


def max_pass_tokens(settings: Settings, base: BaseModel, weight_bytes: int) -> int:
    """Return the maximum size of a forward pass in tokens, including padding; a single sequence may exceed it.

    On a CPU, small models get larger passes, because the fixed cost of a pass exceeds that of its arithmetic; other
    models gain nothing from larger passes. On a GPU, the activations of a pass with gradients take an estimated fifth
    of the memory that the weights leave, divided by the number of models, unless even 1,024 tokens need more. The
    captured passes of a model are up to a quarter larger and keep as much memory beside them.

    Args:
        weight_bytes: size of the weights of all models of the engine.
    """
    if settings.micro_batch_tokens:
        return settings.micro_batch_tokens
    if base.device.type != "cuda":
        return 2048 if base.num_parameters < SMALL_MODEL else 1024
    share = _free_memory(settings, base, weight_bytes) // 5 // len(settings.models)
    return max(1024, min(MAX_PASS_TOKENS, share // base.bytes_per_trained_token))


def max_cache_bytes(settings: Settings, base: BaseModel, weight_bytes: int) -> int:
    """Return the memory for keys and values of one model.

    On a CPU, it is 2 GiB; on a GPU, a quarter of the memory that the weights of all models leave, divided by the number
    of models.
    """
    if settings.sampling_cache_bytes:
        return settings.sampling_cache_bytes
    if base.device.type != "cuda":
        return _CPU_CACHE_BYTES
    return _free_memory(settings, base, weight_bytes) // 4 // len(settings.models)


def max_adapter_bytes(settings: Settings, base: BaseModel, weight_bytes: int) -> int:
    """Return the memory for the adapters and moments of all models.

    It is half of the machine's memory; on a GPU, a quarter of the memory that the weights of all models leave. Engines
    on one device share its memory.
    """
    if settings.memory_limit_bytes:
        return settings.memory_limit_bytes
    if base.device.type != "cuda":
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2 // settings.part.on_device
    return _free_memory(settings, base, weight_bytes) // 4


def _free_memory(settings: Settings, base: BaseModel, weight_bytes: int) -> int:
    """Return the memory that the weights leave of this engine's share of the GPU."""
    share = torch.cuda.get_device_properties(base.device).total_memory // settings.part.on_device
    return share - weight_bytes
