"""Wire format compared with the SDK's encoder and decoder, on ragged shapes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tinker import types
from tinker.proto import tinker_public_pb2 as pb
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.response_conv import deserialize_forward_backward_output

from engine.errors import RequestError
from engine.wire.forward_backward import decode_datum, decode_request, encode_output
from engine.wire.tensors import decode_tensor

Shapes = st.lists(st.tuples(st.integers(1, 30), st.sampled_from([None, 1, 4, 40])), min_size=1, max_size=6)


def shape_of(length: int, width: int | None) -> tuple[int, ...]:
    return (length,) if width is None else (length, width)


@settings(deadline=None)
@given(shapes=Shapes, seed=st.integers(0, 2**16), density=st.sampled_from([0.05, 1.0]))
def test_requests_round_trip(shapes: list[tuple[int, int | None]], seed: int, density: float) -> None:
    """The SDK sends two-dimensional tensors with few entries as sparse CSR, others as dense."""
    generator = torch.Generator().manual_seed(seed)
    sent = []
    for length, width in shapes:
        shape = shape_of(length, width)
        mask = torch.rand(shape, generator=generator) < density
        targets = torch.randint(1, 2**40, shape, generator=generator).where(mask, 0)
        weights = torch.randn(shape, generator=generator).where(mask, 0.0)
        sent.append((torch.randint(0, 2**31, (length,), generator=generator), targets, weights))
    data = [
        types.Datum(
            types.ModelInput.from_ints(tokens.tolist()),
            {"target_tokens": targets, "weights": weights},  # pyright: ignore[reportArgumentType]
        )
        for tokens, targets, weights in sent
    ]
    request = types.ForwardBackwardRequest(types.ForwardBackwardInput(data, "cross_entropy"), "model", 3)
    bodies = [forward_backward_request_to_proto(request).SerializeToString() for _ in range(2)]
    first, second = (decode_request(body) for body in bodies)
    assert first.digest == second.digest
    assert (first.model_id, first.seq_id, first.loss_fn) == ("model", 3, "cross_entropy")
    for index, ((tokens, targets, weights), message) in enumerate(zip(sent, first.data, strict=True)):
        datum = decode_datum(message, index, ("weights", "advantages"))
        assert torch.equal(datum.tokens_T, tokens)
        assert torch.equal(datum.targets, targets)
        assert datum.inputs.keys() == {"weights"}
        assert torch.equal(datum.inputs["weights"], weights)


@settings(deadline=None)
@given(shapes=Shapes, seed=st.integers(0, 2**16))
def test_results_round_trip(shapes: list[tuple[int, int | None]], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logprobs_D = [torch.randn(shape_of(*shape), generator=generator) for shape in shapes]
    output = deserialize_forward_backward_output(encode_output(logprobs_D, {"loss:sum": 2.5}))
    assert output.metrics == {"loss:sum": 2.5}
    received = [datum["logprobs"].to_torch() for datum in output.loss_fn_outputs]
    torch.testing.assert_close(received, logprobs_D, atol=0, rtol=0)


def csr(**changes: Any) -> pb.Tensor:
    fields: dict[str, Any] = {"rows": [0, 1, 2], "columns": [0, 1], "values": [1.0, 2.0], "shape": [2, 2], **changes}
    return pb.Tensor(
        dtype=pb.DTYPE_FLOAT32,
        shape=fields["shape"],
        sparse_csr=pb.SparseCsr(
            values=np.array(fields["values"], np.float32).tobytes(),
            crow_indices=np.array(fields["rows"], np.int64).tobytes(),
            col_indices=np.array(fields["columns"], np.int64).tobytes(),
        ),
    )


@pytest.mark.parametrize(
    "message",
    [
        csr(rows=[0, 2, 1]),
        csr(rows=[0, 1]),
        csr(rows=[]),
        csr(columns=[0, 2]),
        csr(columns=[0, -1]),
        csr(columns=[0]),
        csr(shape=[2**20, 2**20]),
        csr(shape=[-2, -2]),
        csr(shape=[4]),
        pb.Tensor(dtype=pb.DTYPE_FLOAT32, shape=[3], dense=bytes(8)),
        pb.Tensor(dtype=pb.DTYPE_FLOAT32, dense=bytes(7)),
        pb.Tensor(dtype=pb.DTYPE_BFLOAT16, dense=bytes(8)),
    ],
)
def test_inconsistent_tensor_is_rejected(message: pb.Tensor) -> None:
    with pytest.raises(RequestError, match="weights"):
        decode_tensor(message, "weights")
