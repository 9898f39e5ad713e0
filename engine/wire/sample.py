"""Decode sampling requests from JSON to jobs, and encode results to protobuf."""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence

import numpy as np
import torch
from tinker.proto import tinker_public_pb2 as pb
from tinker.types import EncodedTextChunk, SampleRequest
from torch import Tensor

from engine.compute.datum import check_tokens
from engine.errors import RequestError
from engine.models import LoadedModel
from engine.sampling.job import SampleJob, SampleResult, TopTokens, check_job

MAX_ELEMENTS = 2**24  # a sparse tensor of a few bytes can claim any shape


def decode_job(request: SampleRequest, loaded: LoadedModel) -> SampleJob:
    """Convert a request to a job.

    Raises:
        RequestError: the request is invalid, or the model cannot run it.
    """
    tokens = []
    for chunk in request.prompt.chunks:
        if not isinstance(chunk, EncodedTextChunk):
            raise RequestError(f"The prompt has a chunk of type {chunk.type}; send encoded text only.")
        tokens.extend(chunk.tokens)
    last_n = request.prompt_logprobs_last_n
    if last_n is not None and not 1 <= last_n < len(tokens):
        raise RequestError(
            f"prompt_logprobs_last_n is {last_n}; use 1 to {len(tokens) - 1}, the prompt's length minus 1."
        )
    params = request.sampling_params
    room = loaded.max_context - len(tokens) + 1  # the model never reads the last sampled token
    stop_tokens, stop_strings = _stop_conditions(params.stop, loaded)
    job = SampleJob(
        prompt_T=torch.tensor(tokens, dtype=torch.int64),
        num_samples=request.num_samples,
        max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
        temperature=params.temperature,
        top_k=loaded.vocab_size if params.top_k == -1 else params.top_k,
        top_p=params.top_p,
        stop_tokens=stop_tokens,
        stop_strings=stop_strings,
        seed=secrets.randbits(63) if params.seed is None else params.seed,
        prompt_logprobs=(last_n or len(tokens)) if request.prompt_logprobs else 0,
        topk_prompt=request.topk_prompt_logprobs,
        topk_sample=request.topk_sample_logprobs,
        prompt_targets=_prompt_targets(request, len(tokens)),
        prompt_draws=request.prompt_alt_tokens_k,
    )
    check_job(job, loaded.max_context)
    check_tokens(job.prompt_T, "The prompt", loaded.vocab_size)
    if job.prompt_targets is not None and job.prompt_targets.numel():
        check_tokens(job.prompt_targets.clamp(min=0), "target_prompt_logprobs", loaded.vocab_size)
    return job


def encode_result(result: SampleResult, request: SampleRequest) -> bytes:
    """Encode a finished request. Logprobs of `target_prompt_logprobs` keep the layout of the request's tensor."""
    response = pb.SampleResponse()
    for completion in result.sequences:
        sequence = response.sequences.add(
            stop_reason=pb.STOP_REASON_STOP if completion.stopped else pb.STOP_REASON_LENGTH,
            tokens=np.asarray(completion.tokens, np.int32).tobytes(),
            logprobs=np.asarray(completion.logprobs, np.float32).tobytes(),
        )
        if completion.top is not None:
            sequence.topk_sampled_logprobs.CopyFrom(_top_tokens(completion.top))
    prompt = result.prompt
    if prompt.logprobs_T is not None:
        response.prompt_logprobs = prompt.logprobs_T.numpy().tobytes()
    if prompt.top is not None:
        response.topk_prompt_logprobs.CopyFrom(_top_tokens(prompt.top))
    if prompt.targets is not None:
        response.target_prompt_logprobs.CopyFrom(_target_logprobs(prompt.targets, request))
    if prompt.draws is not None:
        tokens, logprobs = prompt.draws
        response.prompt_alt_tokens.CopyFrom(
            pb.PromptAltTokens(tokens=_dense(tokens, pb.DTYPE_INT64), logprobs=_dense(logprobs, pb.DTYPE_FLOAT32))
        )
    return response.SerializeToString()


def _top_tokens(top: TopTokens) -> pb.TopkLogprobs:
    length, k = top.tokens.shape
    return pb.TopkLogprobs(
        token_ids=top.tokens.numpy().tobytes(), logprobs=top.logprobs.numpy().tobytes(), k=k, length=length
    )


def _dense(tensor: Tensor, dtype: pb.DType.ValueType) -> pb.Tensor:
    return pb.Tensor(dense=tensor.numpy().tobytes(), dtype=dtype, shape=tensor.shape)


def _prompt_targets(request: SampleRequest, num_tokens: int) -> Tensor | None:
    """Decode the target tokens of a prompt, dense or sparse CSR, to int64 with -1 in empty cells.

    Raises:
        RequestError: the tensor is not a matrix of token ids.
    """
    tensor = request.target_prompt_logprobs
    if tensor is None:
        return None
    shape, size = tuple(tensor.shape or ()), len(tensor.data)
    is_matrix = tensor.dtype == "int64" and len(shape) == 2 and shape[0] == num_tokens - 1 and shape[1] >= 0
    if not is_matrix or math.prod(shape) > MAX_ELEMENTS:
        raise RequestError(
            f"target_prompt_logprobs is {tensor.dtype} of shape {shape} for a prompt of {num_tokens} tokens; send "
            f"int64 of shape ({num_tokens - 1}, K), one row for each token after the first, and at most "
            f"{MAX_ELEMENTS} elements."
        )
    values = torch.tensor(tensor.data, dtype=torch.int64)
    if tensor.sparse_crow_indices is None:
        if size != math.prod(shape):
            raise RequestError(
                f"target_prompt_logprobs has {size} values, but its shape {shape} has {math.prod(shape)} cells: send "
                "one value per cell."
            )
        return values.reshape(shape).clamp(min=-1)
    dense = torch.full(shape, -1)
    rows_N, columns_N = _csr_cells(tensor.sparse_crow_indices, tensor.sparse_col_indices or [], size, shape)
    dense[rows_N, columns_N] = values
    return dense.clamp(min=-1)


def _target_logprobs(logprobs: Tensor, request: SampleRequest) -> pb.Tensor:
    tensor = request.target_prompt_logprobs
    if tensor is None or tensor.sparse_crow_indices is None:
        return _dense(logprobs, pb.DTYPE_FLOAT32)
    crow, columns = tensor.sparse_crow_indices, tensor.sparse_col_indices or []
    rows_N, columns_N = _csr_cells(crow, columns, len(tensor.data), tuple(logprobs.shape))
    csr = pb.SparseCsr(
        values=logprobs[rows_N, columns_N].numpy().tobytes(),
        crow_indices=np.asarray(crow, np.int64).tobytes(),
        col_indices=np.asarray(columns, np.int64).tobytes(),
    )
    return pb.Tensor(sparse_csr=csr, dtype=pb.DTYPE_FLOAT32, shape=logprobs.shape)


def _csr_cells(
    crow: Sequence[int], columns: Sequence[int], num_values: int, shape: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """Return row and column of each value of a sparse CSR tensor."""
    starts = torch.tensor(crow, dtype=torch.int64)
    columns_N = torch.tensor(columns, dtype=torch.int64)
    counts = starts.diff()
    consistent = (
        len(starts) == shape[0] + 1
        and int(starts[0]) == 0
        and int(starts[-1]) == len(columns_N) == num_values
        and bool((counts >= 0).all())
        and bool(((columns_N >= 0) & (columns_N < shape[1])).all())
    )
    if not consistent:
        raise RequestError(
            f"target_prompt_logprobs is not a valid sparse CSR tensor of shape {shape}: check its indices."
        )
    return torch.repeat_interleave(torch.arange(shape[0]), counts), columns_N


def _stop_conditions(stop: object, loaded: LoadedModel) -> tuple[frozenset[int], tuple[str, ...]]:
    """Return stop tokens and stop strings.

    None means the model's end tokens, and an empty list means no stop. Empty strings are ignored, because every text
    contains the empty string.
    """
    if stop is None:
        return frozenset(loaded.eos_token_ids), ()
    if isinstance(stop, str):
        stop = [stop]
    if not isinstance(stop, (list, tuple)):
        raise RequestError(f"stop is {stop!r}; send a string, a list of strings or a list of token ids.")
    tokens = frozenset(item for item in stop if isinstance(item, int))
    return tokens, tuple(item for item in stop if isinstance(item, str) and item)
