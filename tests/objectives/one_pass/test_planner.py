"""One pass of the service compared with two, on a real engine."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from contextvars import ContextVar, copy_context
from dataclasses import replace
from typing import Any

import pytest
import tinker
import torch
from engine_process import EngineProcess
from ragged_batches import make_batch
from torch import Tensor

from objectives import Objective, ObjectiveError, ObjectiveSpec, OnePass, forward_backward_regularized, regularizer
from objectives.errors import UntraceableError

# With a small epsilon, the last bit of a gradient near 0 would change an entire update.
ADAM = tinker.AdamParams(learning_rate=0.02, eps=1.0)
TEXTS = ("so <<2+2=4>> and", "hello", "the quick brown fox jumps", "a b", "so it is, and so be it")
SCHEDULE = {"schedule": "linear", "start": 0.0, "end": 0.4}


@pytest.fixture(scope="module")
def service(engine_url: str) -> tinker.ServiceClient:
    return tinker.ServiceClient(base_url=engine_url, api_key="tml-test")


def new_client(service: tinker.ServiceClient) -> tinker.TrainingClient:
    return service.create_lora_training_client("tiny", rank=4, seed=0).result()


def make_data(client: tinker.TrainingClient, step: int = 0, num_targets: int = 1) -> tuple[list[Any], list[Tensor]]:
    """Make a ragged batch with prompts, sampling logprobs and advantages for one step, and reference logprobs."""
    generator = torch.Generator().manual_seed(step)
    tokenizer = client.get_tokenizer()
    data, reference_D = [], []
    for text in TEXTS[step % 3 :]:
        tokens = torch.tensor(tokenizer.encode(text))
        shape = (len(tokens) - 1,) if num_targets == 1 else (len(tokens) - 1, num_targets)
        weights = torch.rand(shape, generator=generator) * 0.1
        weights[:2] = 0
        targets = tokens[1:] if num_targets == 1 else torch.stack([tokens[1:], (tokens[1:] + 1) % 200], -1)
        inputs = {"target_tokens": targets, "weights": weights}
        if num_targets == 1:
            inputs["logprobs"] = -5 - torch.rand(shape, generator=generator)
            inputs["advantages"] = torch.randn(shape, generator=generator)
        data.append(tinker.Datum(tinker.ModelInput.from_ints(tokens[:-1].tolist()), inputs))  # pyright: ignore[reportArgumentType]
        reference_D.append(-5 - torch.rand(shape, generator=generator))
    return data, reference_D


def run(
    client: tinker.TrainingClient, objective: Objective | OnePass, num_targets: int = 1, num_steps: int = 3
) -> tuple[list[dict[str, float]], Tensor]:
    """Train; return the metrics of all steps and the logprobs after the last."""
    metrics = []
    for step in range(num_steps):
        data, reference_D = make_data(client, step, num_targets)
        pending = forward_backward_regularized(
            client, data, objective, step=step, num_steps=num_steps, ref_logprobs_D=reference_D
        )
        client.optim_step(ADAM).result()
        metrics.append(pending.result().metrics)
    outputs = client.forward(make_data(client, 0, num_targets)[0], "cross_entropy").result().loss_fn_outputs
    return metrics, torch.cat([output["logprobs"].to_torch() for output in outputs])


TOKENS = {"name": "unlikely_tokens", "weight": 0.1, "params": {"tokens": (101, 32)}}


@pytest.mark.parametrize(
    ("base", "terms", "num_targets"),
    [
        (
            "cross_entropy",
            [{"name": "confidence", "weight": 0.5}, {"name": "magnitude", "weight": SCHEDULE}, TOKENS],
            1,
        ),
        ("cross_entropy", [{"name": "sparsity"}, {"name": "l1", "weight": 0.1, "every": 2}], 1),
        ("ppo", [{"name": "kl", "weight": SCHEDULE}, {"name": "negative_entropy", "weight": 0.01}], 1),
        ("gspo", [{"name": "elastic_net", "weight": 0.02}], 1),
        ("gspo", [], 1),
        ("ppo", [], 1),
        ({"name": "cispo", "params": {"clip_high_threshold": 2.0}}, [], 1),
        ("dro", [{"name": "l2", "weight": 0.01}], 1),
        ("stable_reinforce", [], 1),
        ("importance_sampling", [], 1),
        ("cross_entropy", [{"name": "divergence_topk"}, {"name": "negative_entropy_topk", "weight": SCHEDULE}], 2),
    ],
)
def test_one_pass_trains_like_two_passes(
    service: tinker.ServiceClient, base: Any, terms: Sequence[Any], num_targets: int
) -> None:
    two = run(new_client(service), Objective(base, terms), num_targets)
    one = run(new_client(service), OnePass(Objective(base, terms, backend="server"), service), num_targets)
    torch.testing.assert_close(one[1], two[1], rtol=1e-6, atol=2e-6)
    for one_pass, two_passes in zip(one[0], two[0], strict=True):
        # The service's metrics of its own losses have a colon in their names.
        one_pass, two_passes = (
            {key: step_metrics[key] for key in step_metrics if key == "loss:sum" or ":" not in key}
            for step_metrics in (one_pass, two_passes)
        )
        assert one_pass.keys() == two_passes.keys()
        for key in one_pass.keys() - {key for key in one_pass if key.endswith("duration_s")}:
            # Policy losses are small differences between sums of over a hundred nats.
            assert one_pass[key] == pytest.approx(two_passes[key], rel=1e-6, abs=1e-5), key


def uploads(engine: EngineProcess, service: tinker.ServiceClient) -> int:
    folder = engine.state / "custom_losses" / service.holder.get_session_id()
    return len(list(folder.iterdir())) if folder.exists() else 0


def test_scheduled_weights_need_no_new_upload(engine: EngineProcess, engine_url: str) -> None:
    with tinker.ServiceClient(base_url=engine_url, api_key="tml-test") as service:
        terms = [{"name": "confidence", "weight": SCHEDULE}, {"name": "l2", "every": 2}]
        client = new_client(service)
        metrics, _ = run(client, OnePass(Objective(regularizers=terms), service), num_steps=4)
        assert [step_metrics["term/confidence/weight"] for step_metrics in metrics] == pytest.approx(
            [0.0, 0.4 / 3, 0.8 / 3, 0.4]
        )
        assert ["term/l2/value" in step_metrics for step_metrics in metrics] == [True, False, True, False]
        assert uploads(engine, service) == 2  # with l2 and without
        # Another objective with the same terms, as in a sweep over weights, reuses the session's losses.
        others = [{**term, "weight": 3.0} for term in terms]
        run(client, OnePass(Objective(regularizers=others), service), num_steps=2)
        assert uploads(engine, service) == 2


def test_a_named_loss_is_not_uploaded(engine: EngineProcess, engine_url: str) -> None:
    with tinker.ServiceClient(base_url=engine_url, api_key="tml-test") as service:
        one_pass = OnePass(Objective("ppo", backend="server"), service)
        run(new_client(service), one_pass, num_steps=2)
        assert uploads(engine, service) == 0
        assert one_pass.objective.passes == 1


CALLER: ContextVar[int] = ContextVar("caller", default=0)


@regularizer("test_one_pass_monitor", kind="monitor")
def monitor(outputs, batch):
    return {"least": outputs.logprobs_DT.min(), "caller": CALLER.get()}


def test_a_monitor_is_computed_from_the_result_in_the_context_of_the_caller(
    service: tinker.ServiceClient,
) -> None:
    objective = Objective(regularizers=[{"name": "sparsity"}, {"fn": monitor}], backend="server")

    def train() -> dict[str, float]:
        CALLER.set(7)
        (metrics,), _ = run(new_client(service), OnePass(objective, service), num_steps=1)
        return metrics

    metrics = copy_context().run(train)
    assert metrics["term/test_one_pass_monitor/least"] < 0
    assert metrics["term/test_one_pass_monitor/caller"] == 7


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"regularizers": [{"name": "l1"}, {"name": "logic"}]},
            "term 'logic' cannot be traced: its estimator 'score_function",
        ),
        (
            {"base_loss": lambda data, lp: (-sum(logprobs.sum() for logprobs in lp), {})},
            "the base loss cannot be traced",
        ),
        ({"base_loss": "grpo"}, "the loss 'grpo' is computed on whole batches"),
        (
            {"regularizers": [{"name": "l1"}], "balance": {"method": "pcgrad"}},
            "the `balance` needs the gradients of all terms before the update",
        ),
        (
            {"regularizers": [{"name": f"l1.{n}", "fn": "l1"} for n in range(15)]},
            "the 15 terms have 17 inputs in total, but the service allows 16",
        ),
    ],
)
def test_an_untraceable_objective_takes_two_passes_or_raises(
    service: tinker.ServiceClient, caplog: pytest.LogCaptureFixture, fields: dict[str, Any], message: str
) -> None:
    spec = ObjectiveSpec.model_validate({"balance": fields.pop("balance", None)})
    client = new_client(service)
    with caplog.at_level(logging.INFO):
        metrics, _ = run(client, OnePass(Objective(**fields, balance=spec.balance), service), num_steps=2)
    (note,) = [record.message for record in caplog.records if record.name == "objectives.sdk.training_loop"]
    assert note.startswith("A step takes two passes of the service, because ")
    assert message in note
    assert all("surrogate_loss:sum" in step_metrics for step_metrics in metrics)
    with pytest.raises(ObjectiveError) as error:
        run(client, OnePass(Objective(**fields, balance=spec.balance, backend="server"), service))
    assert message in str(error.value)
    assert "as the backend 'server' requires" in str(error.value)


def test_the_client_backend_uploads_no_loss(engine: EngineProcess, engine_url: str) -> None:
    with tinker.ServiceClient(base_url=engine_url, api_key="tml-test") as service:
        objective = Objective(regularizers=[{"name": "l1"}], backend="client")
        run(new_client(service), OnePass(objective, service), num_steps=1)
        assert uploads(engine, service) == 0
        with pytest.raises(ObjectiveError, match=r"pass OnePass\(objective, service_client\) instead"):
            run(new_client(service), Objective(backend="server"), num_steps=1)


def test_a_service_without_custom_losses_takes_two_passes(engine_url: str) -> None:
    with tinker.ServiceClient(base_url=engine_url, api_key="tml-test") as service:
        flags = service.holder._client_config
        service.holder._client_config = flags.model_copy(update={"custom_loss_server_side": False})
        rejecting = OnePass(Objective(regularizers=[{"name": "l1"}], backend="server"), service)
        with pytest.raises(ObjectiveError, match="the service does not run custom losses; set the backend to 'auto'"):
            run(new_client(service), rejecting)


clock = itertools.count()


@regularizer("test_one_pass_moody")
def moody(outputs, batch):
    return outputs.logprobs_DT * (1.0 if next(clock) < 2 else -100.0)


def test_a_term_that_changes_after_tracing_fails_the_run(service: tinker.ServiceClient) -> None:
    """The term returns other values at the first step than while it is traced and verified."""
    with pytest.raises(ObjectiveError, match=r"At step 0 the service's loss was .* so a term depends on more"):
        run(new_client(service), OnePass(Objective(regularizers=[{"fn": moody}]), service))


def test_inputs_that_cannot_be_traced_end_the_one_pass_of_all_inputs(
    service: tinker.ServiceClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resumed run would take two passes at every step."""

    def refuse(*_: object) -> None:
        raise UntraceableError("a term reads the reference")

    one_pass = OnePass(Objective(regularizers=[{"name": "l1"}]), service)
    batch, outputs = make_batch([2, 3])
    with_reference = replace(outputs, ref_logprobs_DT=outputs.logprobs_DT)
    assert one_pass.loss_at(0, outputs, batch) is not None
    monkeypatch.setattr("objectives.one_pass.planner.trace_terms", refuse)
    assert one_pass.loss_at(1, with_reference, batch) is None
    assert one_pass.loss_at(2, outputs, batch) is None
    assert one_pass.objective.passes == 2
    assert [note.split(",")[0] for note in one_pass.pop_notes()] == [
        "A step takes one pass of the service: the base loss and every term can be traced.",
        "A step takes two passes of the service",
    ]


def test_a_resumed_objective_keeps_its_number_of_passes(service: tinker.ServiceClient) -> None:
    entries = [{"name": "l1"}]
    first = Objective(regularizers=entries)
    run(new_client(service), OnePass(first, service), num_steps=1)
    assert first.state()["passes"] == 1
    again = Objective(regularizers=entries)
    again.restore({**first.state(), "passes": 2})
    two = OnePass(again, service)
    metrics, _ = run(new_client(service), two, num_steps=1)
    assert "surrogate_loss:sum" in metrics[0]
    old = Objective(regularizers=entries)
    old.restore({"watch": {}, "balance": {}})  # state of a release that always took two passes
    assert old.passes == 2
    new = Objective(regularizers=entries)
    new.restore({})
    assert new.passes is None
