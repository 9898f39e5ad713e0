"""Stored candidates of a run whose data has changed."""

from __future__ import annotations

import json
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import tinker
import torch

from blocks.files.local_directory import LocalDirectory
from engine.tiny import byte_tokenizer
from objectives.batch import Batch
from objectives.errors import ObjectiveError
from tasks.training.candidates import CandidateSampler, CandidateSettings, Completion, _to_json, prompts_of
from tasks.training.datums import pack_datums

NO_CLIENT: Any = None


def batch_of(*texts: str) -> Batch:
    """One datum per text, whose last two bytes are trained."""
    tokenizer, datums = byte_tokenizer(), []
    for text in texts:
        tokens = torch.tensor(tokenizer.encode(text))
        weights = torch.tensor([0.0] * (len(tokens) - 3) + [1.0, 1.0])
        inputs = {"target_tokens": tokens[1:], "weights": weights}
        tensors = {name: tinker.TensorData.from_torch(value) for name, value in inputs.items()}
        model_input = tinker.ModelInput.from_ints(tokens[:-1].tolist())
        datums.append(tinker.Datum(model_input=model_input, loss_fn_inputs=tensors))
    return pack_datums(datums, tokenizer)


def candidates_of(batch: Batch, directory: LocalDirectory) -> Batch:
    """Load the stored candidates of step 0 for a batch."""
    settings = CandidateSettings(num=2, max_tokens=4, every=1, overlap=False, seed=0)
    sampler = CandidateSampler(settings, directory, byte_tokenizer(), list)
    loaded: Future[Batch] = Future()
    loaded.set_result(batch)
    try:
        return sampler.start(0, loaded, NO_CLIENT).result()
    finally:
        sampler.close()


def test_candidates_of_other_prompts_are_rejected(tmp_path: Path) -> None:
    """Their number alone says nothing: completions of one prompt would be scored as those of another."""
    batch = batch_of("1 + 1 = 2.", "2 + 2 = 4.")
    sampled = [Completion((50, 46), (-1.0, -2.0), False), Completion((51, 46), (-1.5, -2.5), False)]
    with LocalDirectory(tmp_path / "run") as directory:
        directory.write_bytes("candidates-000000.json", _to_json([sampled, sampled]))
        assert candidates_of(batch_of("9 + 9 = 18", "3 + 1 = 4."), directory).num_datums == 4, "as release 0.1 stored"

        # A prompt is followed by the sampled tokens, of which the last is no input.
        inputs = [datum.model_input.to_ints() for datum in candidates_of(batch, directory).datums]
        assert inputs == [[*prompt, first] for prompt in prompts_of(batch) for first in (50, 51)]

        rows = json.loads(directory.read_bytes("candidates-000000.json") or b"")
        for group, digest in zip(rows, ("other", "prompts"), strict=True):
            for row in group:
                row["prompt"] = digest
        directory.write_bytes("candidates-000000.json", json.dumps(rows).encode())
        with pytest.raises(ObjectiveError, match="has completions of other prompts than the batch of step 0"):
            candidates_of(batch, directory)
