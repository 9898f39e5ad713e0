"""The custom losses of all sessions, in memory and on disk: a client's loss outlives a restart of the engine."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from tinker.types import CreateCustomLossRequest

from engine.checkpoints.files import disk_errors, replace_json
from engine.custom_loss.graph import read_graph
from engine.custom_loss.loss import CustomLoss
from engine.errors import NotThereError, RequestError

MAX_LOSSES = 1000  # of one session


class CustomLosses:
    """Losses by session and number; a session's go when it ends."""

    def __init__(self, state: Path) -> None:
        self._folder = state / "custom_losses"
        self._losses: dict[str, CustomLoss] = {}

    def create(self, content: dict[str, Any], asked: CreateCustomLossRequest) -> str:
        """Check and keep a loss; returns its id. The same loss under the same number is a repeat.

        Args:
            content: the request as it came.
            asked: the request, validated; its session lives.

        Raises:
            RequestError: the loss is refused, or another one has its number.
        """
        loss = CustomLoss(read_graph(asked.name, asked.inputs, asked.graph.nodes))
        path = self._path(asked.session_id, asked.custom_loss_seq_id)
        if path.exists():
            if json.loads(path.read_bytes()) != content:
                raise RequestError(
                    f"Custom loss {asked.custom_loss_seq_id} of session {asked.session_id} was already created with "
                    "other content: two clients share one session; give each its own service client."
                )
        else:
            if asked.custom_loss_seq_id >= MAX_LOSSES:
                raise RequestError(f"A session has at most {MAX_LOSSES} custom losses: use one of them again.")
            with disk_errors("The custom loss"):
                path.parent.mkdir(parents=True, exist_ok=True)
                replace_json(path, content)
        loss_id = f"{asked.session_id}:loss:{asked.custom_loss_seq_id}"
        self._losses[loss_id] = loss
        return loss_id

    def find(self, session_id: str, loss_id: object) -> CustomLoss:
        """A loss of a living session.

        Raises:
            NotThereError: the session has no loss of this id.
        """
        found = self._losses.get(str(loss_id))
        session, _, number = str(loss_id).partition(":loss:")
        if session != session_id or not (
            found or (number.isdecimal() and self._path(session_id, int(number)).exists())
        ):
            raise NotThereError(
                f"The session {session_id} has no custom loss {loss_id!r}: make it with create_custom_loss, of the "
                "service client that this training client is of."
            )
        if found is None:
            asked = CreateCustomLossRequest.model_validate_json(self._path(session_id, int(number)).read_bytes())
            found = self._losses[str(loss_id)] = CustomLoss(read_graph(asked.name, asked.inputs, asked.graph.nodes))
        return found

    def forget(self, session_id: str) -> None:
        """Drop what a session made."""
        for loss_id in [each for each in self._losses if each.startswith(f"{session_id}:")]:
            del self._losses[loss_id]
        shutil.rmtree(self._folder / session_id, ignore_errors=True)

    def _path(self, session_id: str, number: int) -> Path:
        return self._folder / session_id / f"{number}.json"
