"""Sampling requests and results: JSON to jobs, continuations to protobuf."""

from __future__ import annotations

import secrets

import numpy as np
import torch
from tinker.proto import tinker_public_pb2 as pb
from tinker.types import EncodedTextChunk, SampleRequest

from engine.compute.datum import check_tokens
from engine.errors import RequestError
from engine.models import LoadedModel
from engine.sampling.job import SampleJob, SampleResult, check_job

_NOT_OFFERED = (
    "topk_prompt_logprobs",
    "topk_sample_logprobs",
    "target_prompt_logprobs",
    "prompt_alt_tokens_k",
)


def decode_job(request: SampleRequest, loaded: LoadedModel) -> SampleJob:
    """The job a request asks for.

    Raises:
        RequestError: the model cannot do it, or this engine does not offer it.
    """
    for name in _NOT_OFFERED:
        if getattr(request, name):
            raise RequestError(f"{name} is not offered by this engine: leave it out.")
    tokens = []
    for chunk in request.prompt.chunks:
        if not isinstance(chunk, EncodedTextChunk):
            raise RequestError(f"The prompt has a chunk of kind {chunk.type}; this engine takes encoded text only.")
        tokens.extend(chunk.tokens)
    params = request.sampling_params
    room = loaded.max_context - len(tokens) + 1  # the last token is never fed back
    stop_tokens, stop_strings = _stops(params.stop, loaded)
    job = SampleJob(
        prompt_T=torch.tensor(tokens, dtype=torch.int64),
        num_samples=request.num_samples,
        max_tokens=room if params.max_tokens is None else min(params.max_tokens, max(room, 1)),
        temperature=params.temperature,
        top_k=loaded.vocab_size if params.top_k == -1 else params.top_k,
        top_p=params.top_p,
        stop_tokens=stop_tokens,
        stop_strings=stop_strings,
        seed=secrets.randbits(63) if params.seed is None else params.seed,
        prompt_logprobs=(request.prompt_logprobs_last_n or len(tokens)) if request.prompt_logprobs else 0,
    )
    check_job(job, loaded.max_context)
    check_tokens(job.prompt_T, "The prompt", loaded.vocab_size)
    return job


def encode_result(result: SampleResult) -> bytes:
    """The protobuf body of a finished sampling request."""
    response = pb.SampleResponse()
    for continuation in result.sequences:
        response.sequences.add(
            stop_reason=pb.STOP_REASON_STOP if continuation.stopped else pb.STOP_REASON_LENGTH,
            tokens=np.asarray(continuation.tokens, np.int32).tobytes(),
            logprobs=np.asarray(continuation.logprobs, np.float32).tobytes(),
        )
    if result.prompt_logprobs_T is not None:
        response.prompt_logprobs = result.prompt_logprobs_T.numpy().tobytes()
    return response.SerializeToString()


def _stops(stop: object, loaded: LoadedModel) -> tuple[frozenset[int], tuple[str, ...]]:
    """Stop tokens and stop strings; None is the model's own end, an empty list is no stop at all."""
    if stop is None:
        return frozenset(loaded.eos_token_ids), ()
    if isinstance(stop, str):
        return frozenset(), (stop,)
    if not isinstance(stop, (list, tuple)):
        raise RequestError(f"stop is {stop!r}; send a string, strings or token ids.")
    tokens = frozenset(item for item in stop if isinstance(item, int))
    return tokens, tuple(item for item in stop if isinstance(item, str) and item)
