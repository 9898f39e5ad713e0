"""What an engine is started with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.models import DtypeName


@dataclass(frozen=True, slots=True)
class Settings:
    """One engine.

    Attributes:
        models: names or directories, as given.
        state: the folder of its checkpoints and training runs.
        cache: where built-in models are made.
        threads: of torch; None leaves it to torch.
        api_key: what clients must send; None asks for none, which is for loopback only.
        micro_batch_tokens: of one forward pass, padding included: it bounds memory.
        max_body_bytes: of one request, decompressed.
        max_sessions: clients that are there at one time.
        max_models: in training at one time.
        max_waiting_requests: of one model; beyond these, clients are asked to come again.
        memory_limit_bytes: of adapters, moments, gradients and snapshots; the least recently used go to disk.
        clock_cycle_s: seconds between two ticks on which work may start; 0 lets it start at once.
        log_requests: whether to log one line of JSON for each request.
        max_waiting_samples: of one model, beyond which clients are asked to come again.
        sampling_cache_bytes: of the keys and values of all samples in generation on one model.
        deterministic: whether a sample's bits are the same whatever is sampled beside it, which costs time.
        retrieve_futures: clients learn of their finished samples by one request for all of them.
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
    micro_batch_tokens: int = 1024
    max_body_bytes: int = 256 * 2**20
    max_sessions: int = 256
    max_models: int = 256
    max_waiting_requests: int = 1024
    memory_limit_bytes: int = 2 * 2**30
    clock_cycle_s: float = 0.0
    log_requests: bool = False
    max_waiting_samples: int = 4096
    sampling_cache_bytes: int = 2 * 2**30
    deterministic: bool = False
    retrieve_futures: bool = False
