"""Checkpoints are complete, exact and available after a restart."""

from __future__ import annotations

import errno
import json
import resource
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tinker
import torch
from engine_process import API_KEY, EngineProcess, running_engine
from tinker import types
from train_steps import train

from engine.checkpoints.checkpoint import ADAPTER, SaveMetadata
from engine.checkpoints.names import CheckpointName
from engine.checkpoints.runs import RunStore
from engine.checkpoints.store import CheckpointStore, pack
from engine.compute.lora import LoraSpec
from engine.errors import EngineError, NotFoundError

STATE_OF_0_1 = Path(__file__).parents[1] / "flows" / "runs" / "data" / "run_of_0_1" / "engine"


def files_of(engine: EngineProcess, path: str) -> dict[str, bytes]:
    run, kind, name = path.removeprefix("tinker://").split("/")
    (folder,) = (engine.state / "runs" / run.replace(":", "_") / kind).glob(f"{name}@*")
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_training_runs_have_the_format_of_release_0_1(tmp_path: Path) -> None:
    (run,) = RunStore(STATE_OF_0_1).all()
    RunStore(tmp_path).save(run)
    (stored,), (written,) = STATE_OF_0_1.glob("runs/*/run.json"), tmp_path.glob("runs/*/run.json")
    assert written.parent.name == stored.parent.name
    assert json.loads(written.read_text()) == json.loads(stored.read_text())


def test_engines_do_not_undo_each_others_changes(tmp_path: Path) -> None:
    """Two stores on one folder, as in two processes, change the description of one checkpoint at the same time."""
    stores = [CheckpointStore(tmp_path) for _ in range(2)]
    name = CheckpointName("a:train:0", "weights", "b")
    stores[0].save(name, SaveMetadata("tiny", LoraSpec(rank=1, seed=0)), {ADAPTER: b""}, overwrite=False)
    with ThreadPoolExecutor(2) as pool:
        for attempt in range(30):
            public = attempt % 2 == 0
            changes = (
                pool.submit(stores[0].set_public, name, public),
                pool.submit(stores[1].set_ttl, name, 3600 if public else None),
            )
            for change in changes:
                change.result()
            found = stores[0].find(name)
            assert (found.public, found.expires_at is not None) == (public, public)


def test_a_failed_flush_leaves_a_readable_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save that fails after its description is in place must not delete the tensors that the description names."""
    store, name = CheckpointStore(tmp_path), CheckpointName("a:train:0", "weights", "b")
    metadata = SaveMetadata("tiny", LoraSpec(rank=1, seed=0))
    old, new = (pack({"w": torch.full((2,), value)}) for value in (1.0, 2.0))
    store.save(name, metadata, {ADAPTER: old}, overwrite=False)

    def fail(folder: Path) -> None:
        raise OSError(errno.EIO, "Input/output error")

    for module, expected in (("store", 1.0), ("files", 2.0)):  # before the rename of the description, after it
        with monkeypatch.context() as patch:
            patch.setattr(f"engine.checkpoints.{module}.flush_folder", fail)
            with pytest.raises(EngineError, match="could not be written"):
                store.save(name, metadata, {ADAPTER: new}, overwrite=True)
        assert store.read(store.find(name), ADAPTER)["w"].tolist() == [expected] * 2


def test_read_of_a_replaced_or_deleted_checkpoint_says_so(tmp_path: Path) -> None:
    """A sampler reads the weights when it is first used, and again after they were evicted from memory."""
    store, name = CheckpointStore(tmp_path), CheckpointName("a:train:0", "sampler_weights", "b")
    metadata, files = SaveMetadata("tiny", LoraSpec(rank=1, seed=0)), {ADAPTER: pack({"w": torch.ones(2)})}
    first = store.save(name, metadata, files, overwrite=False)
    second = store.save(name, metadata, files, overwrite=True)
    assert store.read(second, ADAPTER)["w"].tolist() == [1.0, 1.0]
    store.delete(name)
    for checkpoint in (first, second):
        with pytest.raises(NotFoundError, match=r"/b were replaced or deleted .*: create a new client"):
            store.read(checkpoint, ADAPTER)


@pytest.mark.process
def test_resume_after_kill_is_bitwise_exact(tmp_path: Path, batch: list[types.Datum]) -> None:
    """Three steps, save, kill -9, restart, load and three steps equal six uninterrupted steps."""
    with running_engine(tmp_path / "engine") as engine:
        service = tinker.ServiceClient(base_url=engine.url, api_key=API_KEY)
        metadata = {"renderer_name": "role_colon"}
        trainer = service.create_lora_training_client(
            base_model="tiny", rank=4, seed=3, user_metadata=metadata
        ).result()
        train(trainer, batch, 3)
        saved = trainer.save_state("half").result().path
        losses = train(trainer, batch, 3)
        uninterrupted = files_of(engine, trainer.save_state("end").result().path)
        first_run = trainer.model_id
        engine.process.kill()
        service.holder.close()
    with (
        running_engine(tmp_path / "engine") as engine,
        tinker.ServiceClient(base_url=engine.url, api_key=API_KEY) as service,
    ):
        rest = tinker.RestClient(base_url=engine.url, api_key=API_KEY)
        assert rest.get_training_run_by_tinker_path(saved).result().user_metadata == metadata
        assert rest.get_weights_info_by_tinker_path(saved).result().lora_rank == 4
        resumed = service.create_training_client_from_state_with_optimizer(saved).result()
        assert resumed.model_id != first_run
        assert train(resumed, batch, 3) == losses
        assert files_of(engine, resumed.save_state("end").result().path) == uninterrupted


def test_loading_without_optimizer_restores_only_weights(
    service: tinker.ServiceClient, trainer: tinker.TrainingClient, batch: list[types.Datum]
) -> None:
    train(trainer, batch, 2)
    path = trainer.save_state("a").result().path
    fresh = service.create_training_client_from_state(path).result()
    (next_loss,) = train(trainer, batch, 1)
    assert train(fresh, batch, 1) == [next_loss]
    assert train(fresh, batch, 1) != train(trainer, batch, 1)


def test_sampler_weights_have_no_optimizer(service: tinker.ServiceClient, trainer: tinker.TrainingClient) -> None:
    path = trainer.save_weights_for_sampler("a").result().path
    assert path == f"tinker://{trainer.model_id}/sampler_weights/a"
    service.create_training_client_from_state(path).result()
    with pytest.raises(tinker.RequestFailedError, match="has no optimizer state"):
        service.create_training_client_from_state_with_optimizer(path).result()


@pytest.mark.parametrize("name", ["../up", "a/b", "", ".hidden", "-x", "a" * 200, "a\x00b"])
def test_invalid_names_are_rejected(trainer: tinker.TrainingClient, name: str) -> None:
    with pytest.raises(tinker.RequestFailedError, match="is not a valid checkpoint name"):
        trainer.save_state(name).result()


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("tinker://x:train:0/weights/none", "There is no checkpoint tinker://x:train:0/weights/none"),
        ("tinker://../../weights/a", "is not a checkpoint path"),
        ("tinker://x:train:0/weights/../a", "is not a checkpoint path"),
        ("/etc/passwd", "is not a checkpoint path"),
    ],
)
def test_error_names_the_missing_checkpoint(service: tinker.ServiceClient, path: str, sentence: str) -> None:
    with pytest.raises(tinker.RequestFailedError) as error:
        service.create_training_client_from_state(path).result()
    assert sentence in str(error.value)


def test_existing_checkpoint_is_replaced_only_with_overwrite(
    engine: EngineProcess, trainer: tinker.TrainingClient, batch: list[types.Datum]
) -> None:
    path = trainer.save_state("a").result().path
    before = files_of(engine, path)
    train(trainer, batch, 1)
    with pytest.raises(tinker.RequestFailedError, match=r"exists: save under another name, or with overwrite=True"):
        trainer.save_state("a").result()
    assert files_of(engine, path) == before
    assert trainer.save_state("a", overwrite=True, user_metadata={"step": "1"}).result().path == path
    weights = "adapter_model.safetensors"
    assert files_of(engine, path)[weights] != before[weights]


def test_damaged_checkpoint_is_rejected(
    engine: EngineProcess, service: tinker.ServiceClient, trainer: tinker.TrainingClient
) -> None:
    path = trainer.save_state("a").result().path
    run = engine.state / "runs" / trainer.model_id.replace(":", "_")
    (file,) = run.glob("weights/a@*/adapter_model.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(tinker.RequestFailedError, match=r"is damaged.*load an earlier checkpoint"):
        service.create_training_client_from_state_with_optimizer(path).result()
    (run / "weights" / "a.json").write_text("{")
    with pytest.raises(tinker.RequestFailedError, match=r"description .*a\.json is damaged"):
        service.create_training_client_from_state(path).result()


@pytest.mark.process
def test_full_disk_fails_only_the_save(tmp_path: Path, batch: list[types.Datum]) -> None:
    """A limit on file sizes makes writes fail like a full disk."""
    with (
        running_engine(tmp_path / "engine") as engine,
        tinker.ServiceClient(base_url=engine.url, api_key=API_KEY) as service,
    ):
        trainer = service.create_lora_training_client(base_model="tiny", rank=4, seed=3).result()
        path = trainer.save_state("a").result().path
        before = files_of(engine, path)
        train(trainer, batch, 1)
        limits = resource.prlimit(engine.process.pid, resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))
        for name in ("a", "b"):
            with pytest.raises(tinker.RequestFailedError, match=r"could not be written \(File too large\)"):
                trainer.save_state(name, overwrite=True).result()
        assert files_of(engine, path) == before
        assert len(list(engine.state.glob("runs/*/weights/*"))) == 2
        resource.prlimit(engine.process.pid, resource.RLIMIT_FSIZE, limits)
        train(trainer, batch, 1)
        service.create_training_client_from_state_with_optimizer(trainer.save_state("b").result().path).result()


def test_checkpoints_can_be_listed_and_deleted(engine: EngineProcess, trainer: tinker.TrainingClient) -> None:
    rest = tinker.RestClient(base_url=engine.url, api_key=API_KEY)
    training = trainer.save_state("a", user_metadata={"step": "4"}).result().path
    sampler = trainer.save_weights_for_sampler("a").result().path
    listed = rest.list_checkpoints(trainer.model_id).result().checkpoints
    assert [(c.checkpoint_id, c.checkpoint_type, c.tinker_path) for c in listed] == [
        ("weights/a", "training", training),
        ("sampler_weights/a", "sampler", sampler),
    ]
    assert listed[0].user_metadata == {"step": "4"}
    run = rest.get_training_run(trainer.model_id).result()
    assert (run.base_model, run.lora_rank) == ("tiny", 4)
    assert run.last_checkpoint == listed[0]
    assert trainer.model_id in [r.training_run_id for r in rest.list_training_runs().result().training_runs]
    rest.delete_checkpoint_from_tinker_path(training).result()
    assert [c.tinker_path for c in rest.list_checkpoints(trainer.model_id).result().checkpoints] == [sampler]
    with pytest.raises(tinker.NotFoundError, match="There is no checkpoint"):
        rest.delete_checkpoint_from_tinker_path(training).result()
