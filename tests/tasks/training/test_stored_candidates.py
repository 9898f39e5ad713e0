"""Stored candidates of a run whose data has changed."""

from __future__ import annotations

import json
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
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


class Snapshot:
    """Training client, snapshot and sampling client in one: it samples two tokens."""

    num_samples = 0

    def save_weights_and_get_sampling_client(self) -> Snapshot:
        return self

    def sample(self, prompt: tinker.ModelInput, num: int, params: tinker.SamplingParams) -> Snapshot:
        self.num_samples += num
        return self

    def result(self) -> Any:
        sequence = SimpleNamespace(tokens=[52, 46], logprobs=[-1.0, -1.0], stop_reason="stop")
        return SimpleNamespace(sequences=[sequence] * 2, prompt_cache_hit_tokens=0, prompt_logprobs=None)


def candidates_of(
    batch: Batch, directory: LocalDirectory, *, client: Any = NO_CLIENT, num_steps: int = 1, **options: bool
) -> Batch:
    """Load the candidates of the first steps, which all have the same batch; return those of the last step."""
    settings = CandidateSettings(num=2, max_tokens=4, every=1, overlap=False, seed=0)
    sampler = CandidateSampler(settings, directory, byte_tokenizer(), list, **options)
    loaded: Future[Batch] = Future()
    loaded.set_result(batch)
    try:
        return [sampler.start(step, loaded, client).result() for step in range(num_steps)][-1]
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
        with pytest.raises(ObjectiveError, match=r"candidates-000000\.json has completions of other prompts than"):
            candidates_of(batch, directory)


def test_candidates_of_earlier_data_are_sampled_again_if_the_data_may_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tasks.training.candidates.wait_for_snapshot", lambda snapshot: snapshot)
    old, new, longer = batch_of("1 + 1 = 2."), batch_of("2 + 2 = 4."), batch_of("2 + 2 = 4.", "3 + 3 = 6.")
    client = Snapshot()
    with LocalDirectory(tmp_path / "run") as directory:

        def load(batch: Batch, num_steps: int = 3) -> int:
            """Load the candidates of the first steps; return the number of new samples."""
            before = client.num_samples
            loaded = candidates_of(batch, directory, client=client, num_steps=num_steps, data_may_differ=True)
            inputs = [datum.model_input.to_ints() for datum in loaded.datums]
            assert inputs == [[*prompt, 52] for prompt in prompts_of(batch) for _ in range(2)]
            return client.num_samples - before

        assert [load(batch) for batch in (old, old, new, new, longer)] == [6, 0, 6, 0, 12]
        # A run that stops early leaves no candidates of earlier data to a start that would reject them.
        assert load(old, num_steps=1) == 2
        assert directory.names() == ["candidates-000000.json"]
    first, second, _ = capsys.readouterr().err.splitlines()
    assert first.startswith("candidates-000000.json has completions of other prompts than the batch of this step; from")
    assert second.startswith("candidates-000000.json has completions of 1 prompts, but the batch of this step has 2")
