"""REST client of the SDK: every public method works, or fails at once if the engine does not support it."""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyrage
import pytest
import tinker
import torch
from engine_process import API_KEY
from peft import PeftModel
from tinker import types
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


@pytest.fixture
def rest(engine_url: str) -> tinker.RestClient:
    return tinker.RestClient(base_url=engine_url, api_key=API_KEY)


def fetch(url: str) -> bytes:
    with urllib.request.urlopen(url) as response:
        return response.read()


def test_runs_are_paginated(service: tinker.ServiceClient, rest: tinker.RestClient) -> None:
    metadata = {"renderer_name": "role_colon"}
    run_ids = [
        service.create_lora_training_client(base_model="tiny", rank=1, user_metadata=metadata).result().model_id
        for _ in range(3)
    ]
    pages = [rest.list_training_runs(limit=1, offset=offset).result() for offset in range(3)]
    assert [page.training_runs[0].training_run_id for page in pages] == run_ids[::-1]
    assert pages[0].cursor.total_count >= 3
    assert not rest.list_training_runs(offset=10_000).result().training_runs
    assert rest.get_training_run(run_ids[0]).result().user_metadata == metadata
    with pytest.raises(tinker.UnprocessableEntityError):
        rest.list_training_runs(limit=-1).result()


def test_checkpoint_expires_after_its_ttl(rest: tinker.RestClient, trainer: tinker.TrainingClient) -> None:
    short = trainer.save_state("short", ttl_seconds=1).result().path
    long = trainer.save_state("long", ttl_seconds=3600).result().path
    assert short is not None
    assert long is not None
    expiry = {c.tinker_path: c.expires_at for c in rest.list_checkpoints(trainer.model_id).result().checkpoints}
    expected = datetime.now(UTC) + timedelta(hours=1)
    assert abs(expiry[long] - expected) < timedelta(minutes=5)  # pyright: ignore[reportOptionalOperand]
    time.sleep(max(0.0, (expiry[short] - datetime.now(UTC)).total_seconds()))  # pyright: ignore[reportOptionalOperand]
    assert [c.tinker_path for c in rest.list_checkpoints(trainer.model_id).result().checkpoints] == [long]
    with pytest.raises(tinker.RequestFailedError, match=r"There is no checkpoint|expired"):
        trainer.load_state(short).result()
    rest.set_checkpoint_ttl_from_tinker_path(long, None).result()
    assert rest.list_checkpoints(trainer.model_id).result().checkpoints[0].expires_at is None
    trainer.save_state("short").result()


@pytest.mark.parametrize("ttl", [0, -1, 10**12])
def test_invalid_ttl_is_rejected(rest: tinker.RestClient, trainer: tinker.TrainingClient, ttl: int) -> None:
    path = trainer.save_state("a").result().path
    assert path is not None
    with pytest.raises(tinker.UnprocessableEntityError, match="ttl_seconds is"):
        rest.set_checkpoint_ttl_from_tinker_path(path, ttl).result()
    with pytest.raises(tinker.RequestFailedError, match="ttl_seconds is"):
        trainer.save_state("b", ttl_seconds=ttl).result()


def test_publishing_changes_the_public_flag(rest: tinker.RestClient, trainer: tinker.TrainingClient) -> None:
    path = trainer.save_state("a").result().path
    assert path is not None
    for change, public in (
        (rest.publish_checkpoint_from_tinker_path, True),
        (rest.unpublish_checkpoint_from_tinker_path, False),
    ):
        change(path).result()
        (listed,) = [c for c in rest.list_user_checkpoints().result().checkpoints if c.tinker_path == path]
        assert listed.public is public


def test_external_weights_load_in_peft(
    rest: tinker.RestClient,
    trainer: tinker.TrainingClient,
    tiny_path: Path,
    batch: list[types.Datum],
    tmp_path: Path,
) -> None:
    """External weights, downloaded without a key and loaded by peft, give the engine's logprobs."""
    trainer.forward_backward(batch, "cross_entropy").result()
    trainer.optim_step(types.AdamParams(learning_rate=0.1)).result()
    path = trainer.save_weights_external("for-peft").result().path
    links = rest.get_external_weights_urls(path).result()
    assert timedelta() < links.expires - datetime.now(UTC) <= timedelta(hours=1)
    for name, url in links.urls.items():
        (tmp_path / name).write_bytes(fetch(url))
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_path), tmp_path)
    tokens_T = torch.tensor(batch[0].model_input.to_ints())
    targets_T = torch.tensor(batch[0].loss_fn_inputs["target_tokens"].data)
    with torch.no_grad():
        logprobs_TV = model(tokens_T[None]).logits[0].log_softmax(-1)
    ours = trainer.forward(batch[:1], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_torch()
    torch.testing.assert_close(logprobs_TV.gather(1, targets_T[:, None])[:, 0], ours, atol=1e-4, rtol=1e-4)
    with pytest.raises(urllib.error.HTTPError, match="404"):
        fetch(links.urls["adapter_config.json"].replace("adapter_config", "adapter_model"))


def test_external_weights_can_be_encrypted(rest: tinker.RestClient, trainer: tinker.TrainingClient) -> None:
    identity = pyrage.x25519.Identity.generate()
    plain = rest.get_external_weights_urls(trainer.save_weights_external("p").result().path).result().urls
    saved = trainer.save_weights_external("e", age_encryption_recipients=[str(identity.to_public())]).result()
    secret = rest.get_external_weights_urls(saved.path).result().urls
    assert set(secret) == {f"{name}.age" for name in plain}
    for name, url in plain.items():
        assert pyrage.decrypt(fetch(secret[f"{name}.age"]), [identity]) == fetch(url)
    with pytest.raises(tinker.RequestFailedError, match="is not an age recipient"):
        trainer.save_weights_external("f", age_encryption_recipients=["age1nonsense"]).result()
    with pytest.raises(tinker.RequestFailedError, match="no plain adapter weights: load a checkpoint written by"):
        trainer.load_state(saved.path).result()


def test_server_capabilities(rest: tinker.RestClient) -> None:
    (model,) = rest.get_server_capabilities().result().supported_models
    assert (model.model_name, model.max_context_length, model.trainable) == ("tiny", 4096, True)


UnsupportedCall = Callable[[tinker.RestClient, tinker.TrainingClient], Any]


@pytest.mark.parametrize(
    ("call", "feature"),
    [
        (lambda rest, _: rest.get_audit_log().result(), "audit log"),
        (lambda rest, _: rest.get_billing_usage(datetime(2026, 1, 1), datetime(2026, 2, 1)).result(), "billing"),
        (lambda rest, _: rest.get_current_checkpoint_storage_usage().result(), "billing"),
        (lambda rest, _: rest.assign_session_project("s", "p").result(), "projects"),
        (lambda rest, _: rest.list_training_runs(project_id="p").result(), "projects"),
        (lambda rest, _: rest.export_session_trace("s").result(), "traces"),
        (lambda rest, trainer: rest.copy_weights(f"tinker://{trainer.model_id}/weights/a", "p").result(), "projects"),
    ],
)
def test_unsupported_calls_fail_at_once(
    rest: tinker.RestClient, trainer: tinker.TrainingClient, call: UnsupportedCall, feature: str
) -> None:
    with pytest.raises(tinker.UnprocessableEntityError, match=rf"local engine .*{feature}"):
        call(rest, trainer)
