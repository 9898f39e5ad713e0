"""Tensors of a checkpoint, read from the engine's state folder, for comparing the final weights of runs."""

from __future__ import annotations

import re
from pathlib import Path

from safetensors.torch import load_file


def saved_weights(engine_state: Path, state_path: str) -> dict[str, bytes]:
    """Return every tensor of a checkpoint, including the optimizer state, by file and name."""
    match = re.fullmatch(r"tinker://([^:]+):.+/weights/(.+)", state_path)
    assert match, state_path
    files = sorted(engine_state.glob(f"runs/{match[1]}*/weights/{match[2]}@*/*.safetensors"))
    assert len(files) == 2, f"{state_path} has the files {files}"
    return {f"{file.name}:{key}": tensor.numpy().tobytes() for file in files for key, tensor in load_file(file).items()}
