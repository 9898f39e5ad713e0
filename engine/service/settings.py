"""Settings of the local engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from engine.part import ALONE, Part

if TYPE_CHECKING:
    from engine.models import DtypeName


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of one engine.

    Attributes:
        models: names or directories of the models to serve.
        state: folder that stores checkpoints, training runs and sessions.
        cache: folder that stores the weights of the built-in models.
        host, port: address to listen on; port 0 is a free port.
        device, dtype: torch device and dtype of the models; see `engine.models.load_model`.
        threads: number of torch threads; None divides torch's own choice by the number of engines on the device.
        api_key: key that clients must send; None accepts all clients and is allowed only for loopback addresses.
        micro_batch_tokens: maximum size of a forward pass in tokens, including padding; bounds memory. A longer
            sequence has a pass of its own. For None, here and for `memory_limit_bytes` and `sampling_cache_bytes`,
            `engine.memory.capacity` chooses a value that depends on the model and the device.
        max_body_bytes: maximum size of a request body after decompression.
        max_sessions: maximum number of open sessions.
        max_models: maximum number of models in training.
        max_request_s: maximum compute time of one forward or forward_backward in seconds.
        max_waiting_requests: maximum number of waiting requests per model, not counting the next one to run; clients
            retry additional requests later.
        memory_limit_bytes: memory for adapters, moments, gradients and snapshots; the least recently used move to disk
            when it is full.
        clock_cycle_s: seconds between the ticks on which training requests start; 0 starts them immediately.
        log_requests: log one line of JSON per request.
        max_waiting_samples: number of unfinished samples per base model at which further requests are rejected, for
            clients to retry later. The last accepted request may exceed it.
        sampling_cache_bytes: maximum size of keys and values per base model; a single long sample may exceed it. The
            prefix cache uses the part that the samples being generated do not need.
        deterministic: make samples bitwise independent of concurrent requests, in float32 on a CPU.
        retrieve_futures: let a client wait for all its samples with one request.
        part: place among several engines that share `state` behind a front, which listens on `host`.
    """

    models: tuple[str, ...]
    state: Path
    cache: Path
    host: str = "127.0.0.1"
    port: int = 0
    device: str = "cpu"
    dtype: DtypeName = "float32"
    threads: int | None = None
    api_key: str | None = None
    micro_batch_tokens: int | None = None
    max_body_bytes: int = 256 * 2**20
    max_sessions: int = 256
    max_models: int = 256
    max_request_s: float = 3600.0
    max_waiting_requests: int = 1024
    memory_limit_bytes: int | None = None
    clock_cycle_s: float = 0.0
    log_requests: bool = False
    max_waiting_samples: int = 4096
    sampling_cache_bytes: int | None = None
    deterministic: bool = False
    retrieve_futures: bool = False
    part: Part = ALONE
