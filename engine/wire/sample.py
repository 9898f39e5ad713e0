"""Sampling requests and results: JSON to jobs, continuations to protobuf."""

from __future__ import annotations

import math
import secrets

import numpy as np
import torch
from tinker.proto import tinker_public_pb2 as pb
from tinker.types import EncodedTextChunk, SampleRequest
from tinker.types._pydantic_types.tensor_data import TensorData
from torch import Tensor

from engine.compute.datum import check_tokens
from engine.errors import RequestError
from engine.models import LoadedModel
from engine.sampling.job import SampleJob, SampleResult, TopTokens, check_job

MAX_ELEMENTS = 2**26  # a sparse tensor of a few bytes may claim any shape


def decode_job(request: SampleRequest, loaded: LoadedModel) -> SampleJob:
    """The job a request asks for.

    Raises:
        RequestError: the model cannot do it.
    """
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
        topk_prompt=request.topk_prompt_logprobs,
        topk_sample=request.topk_sample_logprobs,
        prompt_targets=_targets(request.target_prompt_logprobs),
        prompt_draws=request.prompt_alt_tokens_k,
    )
    check_job(job, loaded.max_context)
    check_tokens(job.prompt_T, "The prompt", loaded.vocab_size)
    if job.prompt_targets is not None and job.prompt_targets.numel():
        check_tokens(job.prompt_targets.clamp(min=0), "target_prompt_logprobs", loaded.vocab_size)
    return job


def encode_result(result: SampleResult, targets: TensorData | None) -> bytes:
    """The protobuf body of a finished sampling request.

    Args:
        targets: the request's `target_prompt_logprobs`, whose layout their logprobs take.
    """
    response = pb.SampleResponse()
    for continuation in result.sequences:
        sequence = response.sequences.add(
            stop_reason=pb.STOP_REASON_STOP if continuation.stopped else pb.STOP_REASON_LENGTH,
            tokens=np.asarray(continuation.tokens, np.int32).tobytes(),
            logprobs=np.asarray(continuation.logprobs, np.float32).tobytes(),
        )
        if continuation.top is not None:
            sequence.topk_sampled_logprobs.CopyFrom(_top(continuation.top))
    prompt = result.prompt
    if prompt.logprobs_T is not None:
        response.prompt_logprobs = prompt.logprobs_T.numpy().tobytes()
    if prompt.top is not None:
        response.topk_prompt_logprobs.CopyFrom(_top(prompt.top))
    if prompt.targets is not None and targets is not None:
        response.target_prompt_logprobs.CopyFrom(_laid_out(prompt.targets, targets))
    if prompt.draws is not None:
        tokens, logprobs = prompt.draws
        response.prompt_alt_tokens.CopyFrom(
            pb.PromptAltTokens(tokens=_dense(tokens, pb.DTYPE_INT64), logprobs=_dense(logprobs, pb.DTYPE_FLOAT32))
        )
    return response.SerializeToString()


def _top(top: TopTokens) -> pb.TopkLogprobs:
    length, k = top.tokens.shape
    return pb.TopkLogprobs(
        token_ids=top.tokens.numpy().tobytes(), logprobs=top.logprobs.numpy().tobytes(), k=k, length=length
    )


def _dense(tensor: Tensor, dtype: pb.DType.ValueType) -> pb.Tensor:
    return pb.Tensor(dense=tensor.numpy().tobytes(), dtype=dtype, shape=tensor.shape)


def _targets(data: TensorData | None) -> Tensor | None:
    """The tokens of a JSON tensor, dense or sparse CSR, as int64 with -1 where none is named.

    Raises:
        RequestError: it is no matrix of token ids.
    """
    if data is None:
        return None
    shape, size = tuple(data.shape or ()), len(data.data)
    if data.dtype != "int64" or len(shape) != 2 or min(shape) < 0 or math.prod(shape) > MAX_ELEMENTS:
        raise RequestError(
            f"target_prompt_logprobs is {data.dtype} of shape {shape}; send int64 of shape (prompt length - 1, K)."
        )
    values = torch.tensor(data.data, dtype=torch.int64)
    if data.sparse_crow_indices is None:
        if size != math.prod(shape):
            raise RequestError(f"target_prompt_logprobs has {size} values, but its shape {shape} asks for others.")
        return values.reshape(shape).clamp(min=-1)
    whole = torch.full(shape, -1)
    rows_N, columns_N = _cells(data, shape)
    whole[rows_N, columns_N] = values
    return whole.clamp(min=-1)


def _laid_out(logprobs: Tensor, like: TensorData) -> pb.Tensor:
    if like.sparse_crow_indices is None:
        return _dense(logprobs, pb.DTYPE_FLOAT32)
    rows_N, columns_N = _cells(like, tuple(logprobs.shape))
    csr = pb.SparseCsr(
        values=logprobs[rows_N, columns_N].numpy().tobytes(),
        crow_indices=np.asarray(like.sparse_crow_indices, np.int64).tobytes(),
        col_indices=np.asarray(like.sparse_col_indices, np.int64).tobytes(),
    )
    return pb.Tensor(sparse_csr=csr, dtype=pb.DTYPE_FLOAT32, shape=logprobs.shape)


def _cells(data: TensorData, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Row and column of each listed value."""
    starts = torch.tensor(data.sparse_crow_indices, dtype=torch.int64)
    columns_N = torch.tensor(data.sparse_col_indices or [], dtype=torch.int64)
    counts = starts.diff()
    consistent = (
        len(starts) == shape[0] + 1
        and int(starts[0]) == 0
        and int(starts[-1]) == len(columns_N) == len(data.data)
        and bool((counts >= 0).all())
        and bool(((columns_N >= 0) & (columns_N < shape[1])).all())
    )
    if not consistent:
        raise RequestError(
            f"target_prompt_logprobs is not a valid sparse CSR tensor of shape {shape}: check its indices."
        )
    return torch.repeat_interleave(torch.arange(shape[0]), counts), columns_N


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
