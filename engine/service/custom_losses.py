"""Custom losses of all sessions, in memory and on disk, so that they survive a restart of the engine."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tinker.types import CreateCustomLossRequest

from engine.checkpoints.files import disk_errors, replace_json
from engine.custom_loss.graph import read_graph
from engine.custom_loss.loss import CustomLoss
from engine.errors import EngineError, NotFoundError, RequestError

MAX_LOSSES = 1000  # per session
_NUMBER = re.compile(r"[0-9]{1,3}")


class CustomLossStore:
    """Custom losses by session and number. The end of a session deletes its losses."""

    def __init__(self, state: Path) -> None:
        self._folder = state / "custom_losses"
        self._losses: dict[str, CustomLoss] = {}

    def create(self, content: Mapping[str, object], request: CreateCustomLossRequest) -> str:
        """Validate and store a loss; return its id. Repeating a request returns the same id.

        Args:
            content: the JSON of the request, as the client sent it.
            request: the same request, validated; its session exists.

        Raises:
            RequestError: the loss is invalid, its number belongs to another loss, or the session has too many losses.
            EngineError: the write to disk failed, or the stored loss is damaged.
        """
        loss = CustomLoss(read_graph(request.name, request.inputs, request.graph.nodes))
        path = self._path(request.session_id, request.custom_loss_seq_id)
        if path.exists():
            if _load(path) != content:
                raise RequestError(
                    f"Custom loss {request.custom_loss_seq_id} of session {request.session_id} was already created "
                    "with other content: two clients share one session; give each its own service client."
                )
        else:
            if request.custom_loss_seq_id >= MAX_LOSSES:
                raise RequestError(f"A session has at most {MAX_LOSSES} custom losses: reuse an existing one.")
            with disk_errors("The custom loss"):
                path.parent.mkdir(parents=True, exist_ok=True)
                replace_json(path, content)
        loss_id = f"{request.session_id}:loss:{request.custom_loss_seq_id}"
        self._losses[loss_id] = loss
        return loss_id

    def find(self, session_id: str, loss_id: object) -> CustomLoss:
        """Return a loss of an open session.

        Raises:
            NotFoundError: the session has no loss with this id.
            EngineError: the stored loss is damaged.
        """
        loss = self._losses.get(str(loss_id))
        session, _, number = str(loss_id).partition(":loss:")
        is_stored = _NUMBER.fullmatch(number) is not None and self._path(session_id, int(number)).exists()
        if session != session_id or not (loss or is_stored):
            raise NotFoundError(
                f"The session {session_id} has no custom loss {loss_id!r}: create it with create_custom_loss on the "
                "service client that created this training client."
            )
        if loss is None:
            request = CreateCustomLossRequest.model_validate(_load(self._path(session_id, int(number))))
            loss = CustomLoss(read_graph(request.name, request.inputs, request.graph.nodes))
            self._losses[str(loss_id)] = loss
        return loss

    def delete_session(self, session_id: str) -> None:
        """Delete the losses of a session."""
        for loss_id in [key for key in self._losses if key.startswith(f"{session_id}:")]:
            del self._losses[loss_id]
        shutil.rmtree(self._folder / session_id, ignore_errors=True)

    def _path(self, session_id: str, number: int) -> Path:
        return self._folder / session_id / f"{number}.json"


def _load(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        raise EngineError(f"The stored custom loss {path} is damaged: delete it and create the loss again.") from error
