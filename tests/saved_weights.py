"""What a checkpoint holds, read where the engine keeps it: for runs that are to end with the same weights."""

from __future__ import annotations

import re
from pathlib import Path

from safetensors.torch import load_file


def saved_weights(engine_state: Path, state_path: str) -> dict[str, bytes]:
    """Every tensor of a checkpoint, optimizer and all, by file and name."""
    found = re.fullmatch(r"tinker://([^:]+):.+/weights/(.+)", state_path)
    assert found, state_path
    files = sorted(engine_state.glob(f"runs/{found[1]}*/weights/{found[2]}@*/*.safetensors"))
    assert len(files) == 2, f"{state_path} has the files {files}"
    return {f"{file.name}:{key}": tensor.numpy().tobytes() for file in files for key, tensor in load_file(file).items()}
