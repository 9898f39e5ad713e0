"""Rights of flow runs: which code and servers their configs may name (`objectives.config.import_policy`).

A run that was started from a terminal may name any code and server. The run of a deployment may not, because anyone who
can reach the Prefect server can set its config. It may if an unrestricted process, such as a sweep that was started
from a terminal, has signed its config. The key is in the project home, and only the owner of that home can read it.
Everyone may read the signature, but it is valid for this config only.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
from collections.abc import Mapping
from typing import Any

from prefect import Flow, State
from prefect.client.schemas.objects import FlowRun

from blocks.errors import storage_error
from blocks.files.local import home
from objectives.config.import_policy import accept_signed_run, is_restricted, restrict

_TAG = "tinker-flows:signed:"


def signature_tags(flow: str, fields: Mapping[str, Any]) -> list[str]:
    """Return the tags of a flow run that keeps the rights of this process; empty without the rights of a terminal.

    Args:
        flow: name of the flow.
        fields: its parameter `config`, as JSON data.

    Raises:
        StorageError: the key cannot be read or created.
    """
    return [] if is_restricted() else [_TAG + _signature(flow, fields)]


def apply_rights(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:
    """Restrict the process of a deployment's flow run, unless its config is signed; `on_running` hook of the flows.

    Raises:
        StorageError: the key cannot be read or created; the process stays restricted.
    """
    if flow_run.deployment_id is None:
        return
    restrict(str(flow_run.id))
    signatures = [tag.removeprefix(_TAG) for tag in flow_run.tags if tag.startswith(_TAG)]
    config = (flow_run.parameters or {}).get("config")
    if not signatures or not isinstance(config, Mapping):
        return
    expected = _signature(flow.name, config)
    if any(hmac.compare_digest(expected, signature) for signature in signatures):
        accept_signed_run(str(flow_run.id))


def _signature(flow: str, fields: Mapping[str, Any]) -> str:
    signed = json.dumps([flow, fields], sort_keys=True)
    return hmac.new(_key(), signed.encode(), hashlib.sha256).hexdigest()


def _key() -> bytes:
    """Return the key of the project home; the first caller creates it, readable by its owner only."""
    path = home() / "handover.key"
    try:
        if not path.exists():
            draft = home() / f"handover.key.{os.getpid()}.{secrets.token_hex(4)}"
            descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(secrets.token_hex(32).encode())
            try:
                os.link(draft, path)  # unlike a rename, keeps the key of a faster process
            except FileExistsError:
                pass
            finally:
                draft.unlink()
        return path.read_bytes()
    except OSError as error:
        raise storage_error("read or create the key that signs configs in", path, error) from error
