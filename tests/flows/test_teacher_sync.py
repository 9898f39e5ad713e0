"""The student's weights become the teacher's, at the steps of tinker-cookbook's self-distillation."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tinker
from distill_config import distill_fields, questions
from metric_history import curve
from tinker import types
from tinker_cookbook.distillation import sdft
from tinker_cookbook.rl.train import save_checkpoint_and_get_sampling_client

from blocks import RunStorage
from flows.config.distill import SelfConfig
from flows.distill import self_distillation
from tasks.distillation.prompts import QuestionsBuilder
from tasks.training.checkpoints import read_records, step_of

NUM_STEPS = 6
EVERY = 2
PROBE = types.ModelInput.from_ints(list(range(60, 80)))

pytestmark = pytest.mark.usefixtures("prefect_server", "api_key")


def sync_fields(folder: Path, run_name: str, tracking: str, base_url: str) -> dict[str, Any]:
    """Return a run whose teacher sees the student's prompt, and whose weights a term moves."""
    return distill_fields(folder, run_name, tracking, base_url) | {
        "questions": questions(folder, num_train=4),
        "teacher_prompt": "{question}",
        "teacher_sync_every": EVERY,
        "num_steps": NUM_STEPS,
        "checkpoint_every": 1,
        "eval_every": 0,
        "objective": {
            "base_loss": "importance_sampling",
            "regularizers": [{"name": "negative_entropy", "weight": 1.0}],
        },
    }


def test_teacher_is_the_student_of_the_last_sync(tmp_path: Path, engine_url: str, mlflow_uri: str) -> None:
    """With equal prompts, the divergence from the teacher is 0 if both have the same weights."""
    fields = sync_fields(tmp_path, "synced", mlflow_uri, engine_url)
    result = self_distillation(SelfConfig.model_validate(fields))
    ages = [step % EVERY for step in range(NUM_STEPS)]
    assert curve(result, "teacher_age") == ages
    divergences = curve(result, "teacher_kl")
    for age, divergence in zip(ages, divergences, strict=True):
        assert divergence == pytest.approx(0, abs=1e-4) if age == 0 else abs(divergence) > 1e-3

    session = tinker.ServiceClient(base_url=engine_url)
    records = read_records(RunStorage(url=fields["storage"]).run_directory("synced")).checkpoints
    weights = {step_of(record): record.state_path or "" for record in records}
    states = {step_of(record): record.extra["source"] for record in records}
    assert "teacher_sync" not in states[1]
    for step in (3, 5):
        synced_step, path = states[step]["teacher_sync"]
        assert synced_step == step - 1
        student = session.create_training_client_from_state(weights[synced_step]).result()
        expected = student.save_weights_and_get_sampling_client().result().compute_logprobs(PROBE).result()
        teacher = session.create_sampling_client(model_path=path).result().compute_logprobs(PROBE).result()
        assert teacher[1:] == pytest.approx(expected[1:], abs=1e-4)


def test_a_sync_that_the_run_does_not_reach_is_refused(tmp_path: Path) -> None:
    fields = sync_fields(tmp_path, "short", "", "")
    with pytest.raises(ValueError, match="teacher_sync_every=6 is not reached within num_steps=6"):
        SelfConfig.model_validate(fields | {"teacher_sync_every": NUM_STEPS})
    assert SelfConfig.model_validate(fields | {"teacher_sync_every": NUM_STEPS - 1}).teacher_sync_every == 5


@pytest.mark.parametrize("first", [3, pytest.param(4, marks=pytest.mark.slow)])
def test_a_resumed_run_has_the_teacher_of_an_uninterrupted_one(
    tmp_path: Path, engine_url: str, mlflow_uri: str, first: int
) -> None:
    fields = sync_fields(tmp_path, "whole", mlflow_uri, engine_url)
    directory = Path(self_distillation(SelfConfig.model_validate(fields)).directory)

    def logged(key: str) -> list[float]:
        rows = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
        return [row[key] for row in rows if key in row]

    fork = self_distillation(SelfConfig.model_validate(fields | {"run_name": "fork", "resume": f"whole@{first}"}))
    whole = {key: logged(key) for key in ("teacher_age", "teacher_kl")}
    records = (directory / "checkpoints.jsonl").read_text().splitlines()
    kept = [line for line in records if json.loads(line)["step"] <= first]
    (directory / "checkpoints.jsonl").write_text("".join(f"{line}\n" for line in kept))
    assert self_distillation(SelfConfig.model_validate(fields)).resumed_from == first
    assert logged("teacher_age") == whole["teacher_age"] == [step % EVERY for step in range(NUM_STEPS)]
    assert logged("teacher_kl") == pytest.approx(whole["teacher_kl"], abs=1e-3)
    assert curve(fork, "teacher_age") == whole["teacher_age"][first:]
    assert curve(fork, "teacher_kl") == pytest.approx(whole["teacher_kl"][first:], abs=1e-3)


def test_the_cookbook_syncs_at_the_same_steps(tmp_path: Path, engine_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its loop runs on the same service; the teacher of each step is compared with the student of all steps."""
    monkeypatch.setenv("TINKER_BASE_URL", engine_url)
    with tinker.ServiceClient() as service:
        info = service.create_lora_training_client(base_model="tiny", rank=1).result().get_info()
    name = str(info.model_data.tokenizer_id)
    students: list[Sequence[float | None]] = []
    teachers: list[Sequence[float | None]] = []
    build, save = sdft.build_topk_distillation_datums, save_checkpoint_and_get_sampling_client

    async def record_teacher(data: Any, rows: Any, teacher: Any, *rest: Any, **options: Any) -> Any:
        client = await teacher if inspect.isawaitable(teacher) else teacher
        teachers.append(await client.compute_logprobs(PROBE))
        return await build(data, rows, teacher, *rest, **options)

    async def record_student(*arguments: Any, **options: Any) -> Any:
        client, metrics = await save(*arguments, **options)
        students.append(await client.compute_logprobs(PROBE))
        return client, metrics

    monkeypatch.setattr(sdft, "build_topk_distillation_datums", record_teacher)
    monkeypatch.setattr(sdft, "save_checkpoint_and_get_sampling_client", record_student)
    params: dict[str, Any] = questions(tmp_path, num_train=4) | {"renderer_name": "qwen3_instruct"}
    builder = QuestionsBuilder(model_name_for_tokenizer=name, batch_size=4, **params)
    dataset, _ = asyncio.run(builder())

    class Provider:
        def get_batch(self, index: int) -> tuple[Any, list[str], list[str]]:
            return dataset.get_batch(0), ["Say a."] * 4, ["aaaa"] * 4

        def __len__(self) -> int:
            return NUM_STEPS

    config = sdft.Config(
        model_name=name, recipe_name="test", renderer_name="qwen3_instruct", lora_rank=8, learning_rate=1e-2,
        max_tokens=12, teacher_sync_every=EVERY, save_every=0, eval_every=0, log_path=str(tmp_path / "cookbook"),
        max_context_length=512,
    )  # fmt: skip
    asyncio.run(sdft.main(config, Provider()))
    assert len(teachers) == NUM_STEPS
    for step, teacher in enumerate(teachers):
        same = [
            number
            for number, student in enumerate(students[:NUM_STEPS])
            if student[1:] == pytest.approx(teacher[1:], abs=1e-4)
        ]
        assert same == [step // EVERY * EVERY]
