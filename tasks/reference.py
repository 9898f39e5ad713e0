"""The frozen model that some terms measure from, and its logprobs of each datum, asked for once."""

from __future__ import annotations

import base64
import hashlib

import numpy as np
import tinker
import torch
from torch import Tensor

from blocks.errors import ServiceError
from objectives.batch import Batch, pack, unpack
from objectives.kept import Kept
from tasks.answer import wait_for_answer
from tasks.options import retried_task

REFERENCE_NAME = "reference.jsonl"


class Reference:
    """A model that is never trained.

    Attributes:
        kept: its logprobs by the content of the datum.
    """

    __slots__ = ("_client", "_keeps", "_name", "_num_tokens", "kept")

    def __init__(self, client: tinker.TrainingClient, name: str, *, keeps: bool = True) -> None:
        """A client of its own, which nothing updates, and what the config calls it.

        Args:
            keeps: whether the data comes again; samples do not.
        """
        self._client, self._name, self._keeps, self.kept = client, name, keeps, Kept()
        self._num_tokens = 0

    def take_num_tokens(self) -> int:
        """The tokens that the service went over since the last time."""
        taken, self._num_tokens = self._num_tokens, 0
        return taken

    def logprobs(self, batch: Batch) -> Tensor:
        """float32, nats, of the shape of the batch's targets: what the reference makes of each of them.

        Raises:
            ServiceError: the service failed, or answered with logprobs of another shape or that are not finite.
        """
        targets_D = unpack(batch.target_tokens_DT, batch.offsets_D)
        keys_D = self._keys(batch, targets_D)
        known = self.kept.find(keys_D)
        new = {key: d for d, key in enumerate(keys_D) if key not in known}
        if new:
            datums = list(batch.datums)
            pending = self._client.forward([datums[d] for d in new.values()], "cross_entropy")
            answer = wait_for_answer(pending, "run the reference's forward pass")
            found_D = [entry["logprobs"].to_torch().float() for entry in answer.loss_fn_outputs]
            for d, found in zip(new.values(), found_D, strict=True):
                if found.shape != targets_D[d].shape or not bool(found.isfinite().all()):
                    raise ServiceError(
                        f"The reference {self._name!r} gave logprobs of shape {tuple(found.shape)} where the targets "
                        f"have {tuple(targets_D[d].shape)}, {int((~found.isfinite()).sum())} of them not finite: "
                        "choose another reference, or report this to whoever runs the service."
                    )
            self._num_tokens += sum(len(found) for found in found_D)
            made = {key: _write(found) for key, found in zip(new, found_D, strict=True)}
            if self._keeps:
                self.kept.keep(made)
            known = {**known, **made}
        logprobs_D = [_read(known[key]).reshape(targets.shape) for key, targets in zip(keys_D, targets_D, strict=True)]
        return pack(logprobs_D)[0]

    def _keys(self, batch: Batch, targets_D: list[Tensor]) -> list[str]:
        return [
            hashlib.sha256(
                f"{self._name}\0{datum.model_input.model_dump_json()}".encode() + targets.numpy().tobytes()
            ).hexdigest()
            for datum, targets in zip(batch.datums, targets_D, strict=True)
        ]


@retried_task(name="reference")
def load_reference(reference: Reference, batch: Batch) -> Tensor:
    """`Reference.logprobs` as a task, run ahead of the step that needs it."""
    return reference.logprobs(batch)


def _write(logprobs: Tensor) -> str:
    return base64.b64encode(logprobs.numpy().astype("<f4").tobytes()).decode()


def _read(text: str) -> Tensor:
    return torch.from_numpy(np.frombuffer(base64.b64decode(text), "<f4").copy())
