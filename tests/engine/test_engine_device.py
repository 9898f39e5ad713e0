"""The device of the compute thread."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine import serve
from engine.service.settings import Settings


@pytest.mark.parametrize(("device", "chosen"), [("cuda:1", [torch.device("cuda:1")]), ("cuda", []), ("cpu", [])])
def test_the_thread_that_loads_a_model_uses_its_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, chosen: list[torch.device]
) -> None:
    """Otherwise, CUDA graphs of a model on another GPU than the first would be empty, already in its self-test."""
    devices: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    monkeypatch.setattr(serve, "resolve_model", lambda *_: tmp_path)
    monkeypatch.setattr(serve, "load_model", lambda _path, name, *_: SimpleNamespace(device=torch.device(name)))

    def checked_base(_: Any) -> Any:
        assert devices == chosen
        return SimpleNamespace(options_without_layers=[])

    monkeypatch.setattr(serve, "checked_base", checked_base)
    serve._load_models(Settings(("tiny",), tmp_path, tmp_path, device=device))
    assert devices == chosen
