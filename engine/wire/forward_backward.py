"""Decode forward_backward requests from protobuf, and encode their results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import groupby

import numpy as np
import torch
from google.protobuf.message import DecodeError
from numpy.typing import NDArray
from tinker.proto import tinker_public_pb2 as pb
from torch import Tensor

from engine.compute.datum import Datum
from engine.errors import RequestError
from engine.wire.fields import read_field
from engine.wire.tensors import decode_tensor, num_sparse_elements

MAX_PARTS = 2**20  # datums of a request, and their chunks, inputs and spans: each takes memory when it is parsed
MAX_SPARSE_ELEMENTS = 2**27  # of all sparse tensors of a request: a few bytes can claim any shape
_DATA_FIELD = pb.ForwardBackwardRequest.DATA_FIELD_NUMBER


@dataclass(frozen=True, slots=True)
class ForwardBackward:
    """Decoded request.

    Its datums are decoded later, so that a bad datum fails the future of the request rather than the HTTP call that
    enqueues it.

    Attributes:
        config: parameters of the loss.
        digest: 16 bytes that are equal for equal requests, independent of their encoding.
    """

    model_id: str
    seq_id: int
    loss_fn: str
    config: Mapping[str, float | str]
    forward_only: bool
    data: Sequence[pb.Datum]
    digest: bytes


def decode_request(body: bytes) -> ForwardBackward:
    """Decode the protobuf body of a request.

    Raises:
        RequestError: the body is not a valid message, has too many parts, or has a negative seq_id.
    """
    message = pb.ForwardBackwardRequest()
    try:
        if len(body) > 2 * MAX_PARTS:  # a part has at least two bytes
            _check_num_parts(body)
        message.ParseFromString(body)
    except (DecodeError, IndexError, ValueError) as error:
        raise RequestError(
            f"The body of forward_backward ({len(body)} bytes) is not a message of tinker 0.38: {error}."
        ) from error
    if message.seq_id < 0:
        raise RequestError(f"seq_id is {message.seq_id}; send an integer of at least 0.")
    return ForwardBackward(
        model_id=message.model_id,
        seq_id=message.seq_id,
        loss_fn=message.loss_fn,
        config=_config(message),
        forward_only=message.forward_only,
        data=message.data,
        digest=blake2b(message.SerializeToString(deterministic=True), digest_size=16).digest(),
    )


def decode_data(messages: Sequence[pb.Datum], inputs: Sequence[str]) -> list[Datum]:
    """Decode datums with the ``loss_fn_inputs`` that the loss reads.

    Raises:
        RequestError: a datum has an image or audio chunk, no integer targets, an invalid tensor, or an invalid
            provenance, or the sparse tensors are too large.
    """
    names = ("target_tokens", *inputs)
    total = sum(
        num_sparse_elements(message.loss_fn_inputs[name])
        for message in messages
        for name in names
        if name in message.loss_fn_inputs
    )
    if total > MAX_SPARSE_ELEMENTS:
        raise RequestError(
            f"The sparse tensors of the batch have {total} elements, more than {MAX_SPARSE_ELEMENTS}: send smaller "
            "batches, or fewer targets per token."
        )
    return [decode_datum(message, index, inputs) for index, message in enumerate(messages)]


def decode_datum(message: pb.Datum, index: int, inputs: Sequence[str]) -> Datum:
    """Decode one datum, whose sparse tensors `decode_data` has checked; raises the errors listed there."""
    name = f"Datum {index}"
    sent = message.loss_fn_inputs
    if "target_tokens" not in sent:
        raise RequestError(f"{name} has no target_tokens in loss_fn_inputs, only {sorted(sent)}: add them.")
    targets = decode_tensor(sent["target_tokens"], f"target_tokens of datum {index}")
    if not np.issubdtype(targets.dtype, np.integer):
        raise RequestError(f"target_tokens of datum {index} are {targets.dtype}; send int64.")
    tokens_T = decode_tokens(message.model_input, name)
    _check_provenance(message, len(tokens_T), len(targets), name)
    return Datum(
        tokens_T=_int64(tokens_T),
        targets=_int64(targets),
        inputs={key: _tensor(decode_tensor(sent[key], f"{key} of datum {index}")) for key in inputs if key in sent},
    )


def decode_tokens(chunks: Sequence[pb.Chunk], name: str) -> NDArray[np.int32]:
    """Decode the token ids of a model input; ``name`` is its name in errors.

    Raises:
        RequestError: a chunk is not text, or not a whole number of int32 tokens.
    """
    tokens = []
    for chunk in chunks:
        kind = chunk.WhichOneof("chunk")
        if kind != "encoded_text":
            raise RequestError(f"{name} has a chunk of type {kind}; send encoded text only.")
        if len(chunk.encoded_text.tokens) % 4:
            raise RequestError(f"{name} has a token chunk of a length that is not a multiple of 4 bytes; send int32.")
        tokens.append(np.frombuffer(chunk.encoded_text.tokens, np.int32))
    return np.concatenate(tokens) if tokens else np.empty(0, np.int32)


def _check_provenance(message: pb.Datum, num_tokens: int, num_targets: int, name: str) -> None:
    """Check the spans that say which sampled sequences the tokens and targets of a datum come from.

    Raises:
        RequestError: only one field has spans, a span names no sequence, or the spans do not tile their field.
    """
    if bool(message.model_input_spans) != bool(message.loss_fn_input_spans):
        raise RequestError(f"{name} has provenance for one of model_input and loss_fn_inputs only: send both or none.")
    for field, spans, length in (
        ("model_input", message.model_input_spans, num_tokens),
        ("loss_fn_inputs", message.loss_fn_input_spans, num_targets),
    ):
        ranges = [_range_of(span) for span in spans]
        if any(part is None or not part.sequence_id or part.offset < 0 or part.length < 0 for part in ranges):
            raise RequestError(
                f"{name} has a provenance span of {field} without a sequence_id or with a negative offset or length: "
                "send those of the sampled sequence."
            )
        covered = sum(part.length for part in ranges if part is not None)
        if spans and covered != length:
            raise RequestError(
                f"The provenance spans of {field} of {name} cover {covered} positions of {length}: tile it exactly."
            )


def _range_of(span: pb.ProvenanceSpan) -> pb.PromptProvenanceSpan | pb.SampledProvenanceSpan | None:
    """Return the range of a sequence that a span names; None for an empty span."""
    kind = span.WhichOneof("span")
    return getattr(span, kind) if kind else None


def encode_output(logprobs_D: Sequence[Tensor], metrics: Mapping[str, float]) -> bytes:
    """Encode a result, with one record for consecutive datums whose logprobs have the same trailing shape.

    Args:
        logprobs_D: logprobs of each datum, ``(T,)`` or ``(T, K)``, float32.
        metrics: values by ``name:reduction``; must include ``loss:sum``.
    """
    output = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics=metrics)
    for trailing_shape, run in groupby(logprobs_D, key=lambda logprobs: tuple(logprobs.shape[1:])):
        arrays = [logprobs.numpy() for logprobs in run]
        record = output.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(arrays))
        field = record.fields["logprobs"]
        field.dtype = pb.DTYPE_FLOAT32
        field.trailing_shape.extend(trailing_shape)
        field.data = b"".join(array.tobytes() for array in arrays)
        field.offsets = np.cumsum([0, *(array.nbytes for array in arrays)], dtype=np.int64).tobytes()
    return output.SerializeToString()


def _check_num_parts(body: bytes) -> None:
    """Check the number of parts of a request: its fields, and those of its datums.

    Raises:
        RequestError: there are too many.
        IndexError: the body ends within a field.
        ValueError: a field has no valid header.
    """
    count = position = datum_end = 0
    while position < len(body):
        count += 1
        if count > MAX_PARTS:
            raise RequestError(f"The body has more than {MAX_PARTS} datums and parts of datums: send less at once.")
        field = read_field(body, position)
        is_in_datum = field.start < datum_end
        if field.number == _DATA_FIELD and field.has_length and not is_in_datum:
            position, datum_end = field.start, field.end  # continue with the fields of this datum
        else:
            position = field.end


def _config(message: pb.ForwardBackwardRequest) -> dict[str, float | str]:
    """Return the loss parameters. The legacy map contains only numbers; only old clients use it."""
    if message.loss_fn_config_v2:
        return {
            name: value.text if value.WhichOneof("value") == "text" else value.number
            for name, value in message.loss_fn_config_v2.items()
        }
    return dict(message.loss_fn_config)


def _tensor(array: NDArray[np.generic]) -> Tensor:
    return torch.from_numpy(array.copy())


def _int64(array: NDArray[np.generic]) -> Tensor:
    return torch.from_numpy(array.astype(np.int64))
