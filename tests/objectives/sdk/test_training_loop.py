"""Objectives in a custom SDK loop on a real engine."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import replace

import pytest
import tinker
import torch

from objectives import (
    Objective,
    ObjectiveError,
    OnePass,
    Outputs,
    RegularizedOutput,
    evaluate_base,
    evaluate_term,
    forward_backward_regularized,
    forward_backward_regularized_async,
    linearize,
    regularizer,
)
from objectives.batch import pack
from objectives.config.spec import WatchSpec
from objectives.gradients.linearize import WeightedTerm
from objectives.sdk.training_loop import pack_data

FORMS = ("sync", "async")
WAIT_S = 60.0  # Upper bound of waits that end at once unless a test fails.
ADAM = tinker.AdamParams(learning_rate=1e-2)
OBJECTIVE = Objective(regularizers=[{"name": "confidence", "weight": 0.5}, {"name": "logic", "weight": 2.0}])


@pytest.fixture(scope="module")
def service(engine_url: str) -> tinker.ServiceClient:
    return tinker.ServiceClient(base_url=engine_url, api_key="tml-test")


@pytest.fixture
def trainer(service: tinker.ServiceClient) -> tinker.TrainingClient:
    return service.create_lora_training_client("tiny", rank=4, seed=0).result()


def run_step(
    trainer: tinker.TrainingClient, data: list[tinker.Datum], objective: Objective, form: str, step: int = 0
) -> RegularizedOutput:
    """Send one step and an update, in one of the two forms of the function; the update is waited for first."""
    if form == "sync":
        pending = forward_backward_regularized(trainer, data, objective, step=step)
        trainer.optim_step(ADAM).result()
        return pending.result()

    async def run() -> RegularizedOutput:
        pending = await forward_backward_regularized_async(trainer, data, objective, step=step)
        await trainer.optim_step(ADAM)
        return await pending

    return asyncio.run(run())


def own_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(("term", "objective", "one-pass"))]


@pytest.fixture
def threads_end() -> Iterator[None]:
    before = own_threads()
    yield
    for thread in set(own_threads()) - set(before):
        thread.join(WAIT_S)
        assert not thread.is_alive()


def make_data(trainer: tinker.TrainingClient, **labels: int) -> list[tinker.Datum]:
    tokenizer = trainer.get_tokenizer()
    data = []
    for text in ("so <<2+2=4>>", "so <<2+2=5>> it is"):
        tokens = tokenizer.encode(text)
        inputs = {"target_tokens": torch.tensor(tokens[1:]), "weights": torch.full((len(tokens) - 1,), 0.1)}
        inputs |= {f"label:{name}": torch.tensor(value) for name, value in labels.items()}
        data.append(tinker.Datum(model_input=tinker.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs))
    return data


def logprobs(trainer: tinker.TrainingClient, data: list[tinker.Datum]) -> list[torch.Tensor]:
    outputs = trainer.forward(data, "cross_entropy").result().loss_fn_outputs
    return [output["logprobs"].to_torch() for output in outputs]


@pytest.mark.parametrize("form", FORMS)
def test_training_equals_sending_the_linearized_weights(service, trainer, form):
    data = make_data(trainer)
    by_hand = service.create_lora_training_client("tiny", rank=4, seed=0).result()
    batch = pack_data(data, trainer.get_tokenizer())
    for step in range(2):
        output = run_step(trainer, make_data(trainer, pair=1), OBJECTIVE, form, step)
        metrics = output.metrics
        assert (output.skipped, output.warnings) == ({}, ())

        outputs = Outputs(pack(logprobs(by_hand, data))[0])
        confidence, logic = OBJECTIVE.regularizers
        features = logic.term.prepare(batch)
        terms = [
            (evaluate_term(confidence, outputs, batch, True), 0.5),
            (evaluate_term(logic, outputs, replace(batch, features=features), True), 2.0),
        ]
        # A mean over tokens is scaled by the sum of the weights, a score per datum by their mean times the datums.
        mass, num_trained = float(batch.weights_DT.sum()), int(batch.mask_DT.sum())
        scales = [mass, mass / num_trained * batch.num_datums]
        rows = [WeightedTerm(*term, scale) for term, scale in zip(terms, scales, strict=True)]
        linear = linearize(evaluate_base(OBJECTIVE.base, outputs, batch), rows, scale=OBJECTIVE.scale(batch))
        weights_D = linear.loss_weights_DT.split(batch.offsets_D.diff().tolist())
        for datum, weights in zip(data, weights_D, strict=True):
            datum.loss_fn_inputs["weights"] = tinker.TensorData.from_torch(weights)
        by_hand.forward_backward(data, "cross_entropy")
        by_hand.optim_step(ADAM).result()

        assert metrics["loss:sum"] == pytest.approx(linear.total, rel=1e-6)
        assert metrics["term/logic/violated"] == 1.0
        assert metrics["term/confidence/grad_share"] == linear.metrics["term/confidence/grad_share"]
    assert all(torch.equal(a, b) for a, b in zip(logprobs(trainer, data), logprobs(by_hand, data), strict=True))


def test_several_targets_a_reference_and_a_schedule(trainer):
    data = make_data(trainer)
    for datum in data:
        targets = datum.loss_fn_inputs["target_tokens"].to_torch()
        several = torch.stack([targets, (targets + 1) % 200], -1)
        datum.loss_fn_inputs["target_tokens"] = tinker.TensorData.from_torch(several)
        datum.loss_fn_inputs["weights"] = tinker.TensorData.from_torch(torch.tensor([0.7, 0.3]).repeat(len(targets), 1))
    weight = {"schedule": "linear", "start": 0, "end": 1}
    objective = Objective(regularizers=[{"name": "test_several", "fn": several_targets, "weight": weight}])
    reference_D = [logprobs_T - 0.5 for logprobs_T in logprobs(trainer, data)]
    pending = forward_backward_regularized(trainer, data, objective, step=1, num_steps=3, ref_logprobs_D=reference_D)
    metrics = pending.result().metrics
    assert metrics["term/test_several/value"] == pytest.approx(0.5)
    assert metrics["loss/total"] == pytest.approx(metrics["loss/base"] + 0.5 * metrics["term/test_several/value"])
    with pytest.raises(
        ObjectiveError,
        match="'test_several' needs ref_logprobs, but this flow provides only the logprobs and topk_logprobs",
    ):
        forward_backward_regularized(trainer, data, objective)


def one_input(index: int, key: str, values: torch.Tensor | None):
    """Return a change of one input of one datum; None removes it."""

    def change(data: list[tinker.Datum]) -> None:
        data[index].loss_fn_inputs.pop(key, None)
        if values is not None:
            data[index].loss_fn_inputs[key] = tinker.TensorData.from_torch(values)

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (one_input(1, "target_tokens", None), "Datum 1 has no target_tokens"),
        (one_input(0, "weights", torch.ones(2)), r"weights of datum 0 has the shape \(2,\), but its target_tokens has"),
        (
            one_input(1, "target_tokens", torch.ones(3, 2).long()),
            r"datum 1 has the shape \(3, 2\), but that of datum 0",
        ),
        (one_input(1, "target_tokens", torch.ones(0).long()), "target_tokens of datum 1 is empty"),
        (one_input(1, "logprobs", None), "Datum 1 has no logprobs of the sampling policy, but other datums"),
        (one_input(0, "logprobs", torch.zeros(3)), r"logprobs of datum 0 has the shape \(3,\)"),
    ],
)
def test_an_input_that_does_not_fit_its_datum_is_named(trainer, change, message):
    data = make_data(trainer)
    for datum in data:
        datum.loss_fn_inputs["logprobs"] = datum.loss_fn_inputs["weights"]
    change(data)
    with pytest.raises(ObjectiveError, match=message):
        forward_backward_regularized(trainer, data, Objective())


def test_reference_logprobs_of_another_order_are_refused(trainer):
    data = make_data(trainer)
    reference_D = logprobs(trainer, data)
    for wrong_D, message in (
        (reference_D[::-1], "ref_logprobs_D of datum 0 has the shape"),
        (reference_D[:1], "has 1 en"),
    ):
        with pytest.raises(ObjectiveError, match=message):
            forward_backward_regularized(trainer, data, Objective(), ref_logprobs_D=wrong_D)


def test_a_batch_without_advantages_says_so(trainer):
    data = make_data(trainer)
    for datum in data:
        weights = datum.loss_fn_inputs.pop("weights").to_torch()
        datum.loss_fn_inputs["advantages"] = tinker.TensorData.from_torch(torch.zeros_like(weights))
    with pytest.raises(ObjectiveError, match="every advantage is 0: leave out this batch"):
        forward_backward_regularized(trainer, data, Objective())


@regularizer("test_several", needs=("topk_logprobs", "ref_logprobs"))
def several_targets(outputs, batch):
    return (outputs.logprobs_DT - outputs.ref_logprobs_DT).mean(-1)


def test_a_policy_loss_reads_sampling_inputs(trainer):
    data = make_data(trainer)
    for datum, advantage in zip(data, (1.0, -1.0), strict=True):
        length = len(datum.loss_fn_inputs["weights"].data)
        del datum.loss_fn_inputs["weights"]
        given = {
            "logprobs": torch.full((length,), -5.0),
            "advantages": torch.tensor([0.0] + [advantage] * (length - 1)),
        }
        datum.loss_fn_inputs.update({key: tinker.TensorData.from_torch(value) for key, value in given.items()})
    batch = pack_data(data, trainer.get_tokenizer())
    assert batch.mask_DT.tolist() == (batch.advantages_DT != 0).tolist()
    metrics = forward_backward_regularized(trainer, data, Objective("importance_sampling")).result().metrics
    ratios = (pack(logprobs(trainer, data))[0] + 5).exp()
    total = -(ratios * batch.advantages_DT).sum().item()
    assert [metrics["loss:sum"], metrics["loss/base_sum"]] == pytest.approx([total, total], rel=1e-4)
    assert metrics["loss/total"] == pytest.approx(total / int(batch.mask_DT.sum()), rel=1e-4)


class Meeting:
    """Term whose calls return only when as many calls as there are terms run at the same time."""

    def __init__(self, num_terms: int, phase: str) -> None:
        self.phase, self.barrier = phase, threading.Barrier(num_terms, timeout=WAIT_S)

    def prepare(self, batch):
        return self._meet("prepare")

    def evaluate(self, outputs, batch):
        return {"present": float(self._meet("evaluate") >= 0)}

    def _meet(self, phase):
        return self.barrier.wait() if phase == self.phase else 0


@pytest.mark.usefixtures("threads_end")
@pytest.mark.parametrize("phase", ["prepare", "evaluate"])
@pytest.mark.parametrize("form", FORMS)
def test_terms_run_concurrently(trainer, form, phase):
    meeting = Meeting(4, phase)
    term = regularizer("test_meeting", "monitor", prepare=meeting.prepare)(meeting.evaluate)
    objective = Objective(regularizers=[{"name": f"meeting_{k}", "fn": term} for k in range(4)])
    metrics = run_step(trainer, make_data(trainer), objective, form).metrics
    assert [metrics[f"term/meeting_{k}/present"] for k in range(4)] == [1.0] * 4


@pytest.mark.usefixtures("threads_end")
@pytest.mark.parametrize("phase", ["prepare", "evaluate"])
def test_the_event_loop_runs_while_terms_do(trainer, phase):
    """A term waits for an asyncio task of the caller, which could not run if the loop were blocked."""
    meeting = Meeting(2, phase)
    term = regularizer("test_meeting", "monitor", prepare=meeting.prepare)(meeting.evaluate)
    data, objective = make_data(trainer), Objective(regularizers=[{"fn": term}])

    async def run() -> tuple[RegularizedOutput, int]:
        async def answer() -> int:
            while meeting.barrier.n_waiting == 0:
                await asyncio.sleep(0.01)
            return meeting.barrier.wait()

        answered = asyncio.create_task(answer())
        pending = await forward_backward_regularized_async(trainer, data, objective)
        assert answered.done()
        return await pending, await answered

    output, place = asyncio.run(run())
    assert output.metrics["term/test_meeting/present"] == 1.0
    assert place == 1


USER: ContextVar[str] = ContextVar("user")


def test_an_inline_term_runs_on_the_callers_thread_and_others_in_its_context(trainer):
    calls: list[tuple[str, int, str]] = []

    def prepare(batch, *, who):
        calls.append((f"prepare {who}", threading.get_ident(), USER.get()))
        return ()

    @regularizer("test_called_from", "monitor", prepare=prepare)
    def where(outputs, batch, *, who):
        calls.append((f"evaluate {who}", threading.get_ident(), USER.get()))
        return {}

    entries = [{"name": who, "fn": where, "params": {"who": who}, "execution": who} for who in ("inline", "thread")]
    token = USER.set("me")
    forward_backward_regularized(trainer, make_data(trainer), Objective(regularizers=entries)).result()
    USER.reset(token)
    assert sorted(call for call, _, _ in calls) == [
        "evaluate inline",
        "evaluate thread",
        "prepare inline",
        "prepare thread",
    ]
    assert {user for _, _, user in calls} == {"me"}
    assert all((thread == threading.get_ident()) == call.endswith("inline") for call, thread, _ in calls)


@pytest.mark.usefixtures("threads_end")
@pytest.mark.parametrize("phase", ["preparing", "evaluating"])
@pytest.mark.parametrize("execution", ["thread", "inline"])
@pytest.mark.parametrize("form", FORMS)
def test_a_terms_error_is_raised_and_leaves_the_client_as_it_was(service, trainer, form, execution, phase):
    cause = ValueError("no such city")

    def fail(doing: str) -> list[float]:
        if doing == phase:
            raise cause
        return [0.0, 1.0]

    @regularizer("test_fails", "scored", prepare=lambda batch: fail("preparing"))
    def fails(outputs, batch):
        return fail("evaluating")

    data = make_data(trainer)
    failing = Objective(regularizers=[{"fn": fails, "execution": execution}, {"name": "confidence"}])
    with pytest.raises(
        ValueError, match=f"Term 'test_fails' failed {phase}: it raised ValueError: no such city"
    ) as error:
        run_step(trainer, data, failing, form)
    assert isinstance(error.value, ObjectiveError)
    assert error.value.__cause__ is cause

    # The failed step left no gradient behind, and the client accepts requests.
    untouched = service.create_lora_training_client("tiny", rank=4, seed=0).result()
    for client in (trainer, untouched):
        run_step(client, data, OBJECTIVE, form)
    assert all(torch.equal(a, b) for a, b in zip(logprobs(trainer, data), logprobs(untouched, data), strict=True))


def test_the_base_losses_error_is_raised_and_leaves_the_client_usable(trainer):
    async def no_loss(data, logprobs):
        raise LookupError("no such row")

    data = make_data(trainer)
    with pytest.raises(ObjectiveError, match=r"Term 'base' failed evaluating: .* LookupError: no such row"):
        forward_backward_regularized(trainer, data, Objective(no_loss))
    run_step(trainer, data, OBJECTIVE, "sync")


@pytest.mark.usefixtures("threads_end")
def test_in_one_pass_the_future_raises_the_terms_error(service, trainer):
    @regularizer("test_fails_late", "monitor")
    def fails(outputs, batch):
        raise ValueError("no such city")

    data = make_data(trainer)
    with OnePass(Objective(regularizers=[{"fn": fails}, {"name": "confidence"}]), service) as objective:
        pending = forward_backward_regularized(trainer, data, objective)
        trainer.optim_step(ADAM).result()  # the service trained on the objective, which this term is not part of
        with pytest.raises(ObjectiveError, match="'test_fails_late' failed evaluating: it raised ValueError: no such"):
            pending.result()
    run_step(trainer, data, OBJECTIVE, "sync")


@pytest.mark.usefixtures("threads_end")
def test_a_cancelled_step_leaves_no_gradient(service, trainer):
    before = own_threads()
    started, released = threading.Event(), threading.Event()

    def prepare(batch):
        started.set()
        assert released.wait(WAIT_S)
        return ()

    @regularizer("test_slow", "monitor", prepare=prepare)
    def slow(outputs, batch):
        return {}

    data, objective = make_data(trainer), Objective(regularizers=[{"fn": slow}])

    async def run() -> None:
        step = asyncio.create_task(forward_backward_regularized_async(trainer, data, objective))
        while not started.is_set():
            await asyncio.sleep(0.01)
        step.cancel()
        with pytest.raises(asyncio.CancelledError):
            await step

    asyncio.run(run())
    threads = set(own_threads()) - set(before)
    assert threads
    released.set()
    for thread in threads:
        thread.join(WAIT_S)
    untouched = service.create_lora_training_client("tiny", rank=4, seed=0).result()
    for client in (trainer, untouched):
        run_step(client, data, OBJECTIVE, "sync")
    assert all(torch.equal(a, b) for a, b in zip(logprobs(trainer, data), logprobs(untouched, data), strict=True))


@pytest.mark.parametrize("form", FORMS)
def test_a_skipped_term_is_reported_with_its_reason(trainer, form):
    @regularizer("test_unreachable", "scored", prepare=unreachable)
    def term(outputs, batch):
        return batch.features

    entry = {"fn": term, "weight": 1.0, "retries": 1, "on_error": "skip"}
    output = run_step(trainer, make_data(trainer), Objective(regularizers=[entry, {"name": "confidence"}]), form)
    place = f"test_training_loop.py, line {unreachable.__code__.co_firstlineno + 2}"
    reason = f"Term 'test_unreachable' failed preparing: it raised OSError: no way there ({place})."
    assert output.skipped == {"test_unreachable": reason}
    assert output.metrics["term/test_unreachable/skipped"] == 1.0
    assert "term/confidence/value" in output.metrics
    assert ATTEMPTS.pop("unreachable") == 2


ATTEMPTS: Counter[str] = Counter()


def unreachable(batch):
    ATTEMPTS["unreachable"] += 1
    raise OSError("no way there")


@pytest.mark.parametrize("passes", [1, 2])
def test_warnings_are_returned_once(service, trainer, passes):
    watch = WatchSpec(dominance_above=0.5, patience=2)
    objective = Objective(
        regularizers=[{"name": "confidence", "weight": 1e3}], watch=watch, backend="server" if passes == 1 else "client"
    )
    with OnePass(objective, service) as one_pass:
        outputs = [
            forward_backward_regularized(trainer, make_data(trainer), one_pass, step=step).result() for step in range(3)
        ]
    assert ["surrogate_loss:sum" in output.metrics for output in outputs] == [passes == 2] * 3
    (warning,) = outputs[1].warnings
    assert (warning.kind, warning.terms, warning.step) == ("dominance", ("confidence",), 1)
    assert warning.text.startswith(
        "Term 'confidence' has had more than 50% of the gradient for 2 consecutive evaluations"
    )
    assert outputs[0].warnings == outputs[2].warnings == ()


def test_a_scored_term_that_cannot_train_is_reported(trainer):
    @regularizer("test_equal", "scored")
    def equal(outputs, batch):
        return [1.0] * batch.num_datums

    objective = Objective(regularizers=[{"fn": equal}], watch=WatchSpec(patience=1))
    (warning,) = run_step(trainer, make_data(trainer), objective, "sync").warnings
    assert (warning.kind, warning.terms) == ("idle", ("test_equal",))


@pytest.mark.parametrize("passes", [1, 2])
def test_a_target_trains_like_the_weights_that_it_finds(service, trainer, passes):
    """A run with a target has the weights of one whose weight is set by hand, and the multiplier is not late."""
    data = make_data(trainer)
    by_hand = service.create_lora_training_client("tiny", rank=4, seed=0).result()
    target = {"at_most": -0.1}
    multipliers: list[float] = []
    pending = []
    with OnePass(Objective(regularizers=[{"name": "confidence", "target": target}]), service) as one_pass:
        objective = one_pass if passes == 1 else one_pass.objective
        for step in range(4):
            # Sent without waiting for the step before.
            pending.append(forward_backward_regularized(trainer, data, objective, step=step, num_steps=4))
            trainer.optim_step(ADAM)
        for future in pending:
            metrics = future.result().metrics
            multipliers.append(metrics["term/confidence/multiplier"])
            assert metrics["term/confidence/weight"] == multipliers[-1]
    assert one_pass.objective.passes == (1 if passes == 1 else None)
    assert multipliers[0] == 0
    assert len(set(multipliers)) == 4
    for step, multiplier in enumerate(multipliers):
        with OnePass(Objective(regularizers=[{"name": "confidence", "weight": multiplier}]), service) as plain:
            objective = plain if passes == 1 else plain.objective
            forward_backward_regularized(by_hand, data, objective, step=step, num_steps=4).result()
            by_hand.optim_step(ADAM).result()
    assert all(torch.equal(a, b) for a, b in zip(logprobs(trainer, data), logprobs(by_hand, data), strict=True))
