"""An objective through the SDK alone, against a real engine."""

from __future__ import annotations

from dataclasses import replace

import pytest
import tinker
import torch

from objectives import (
    Objective,
    ObjectiveError,
    Outputs,
    evaluate_base,
    evaluate_term,
    forward_backward_regularized,
    linearize,
    regularizer,
)
from objectives.batch import pack
from objectives.sdk_loop import pack_data

ADAM = tinker.AdamParams(learning_rate=1e-2)
OBJECTIVE = Objective(regularizers=[{"name": "confidence", "weight": 0.5}, {"name": "logic", "weight": 2.0}])


@pytest.fixture(scope="module")
def service(engine_url: str) -> tinker.ServiceClient:
    return tinker.ServiceClient(base_url=engine_url, api_key="tml-test")


@pytest.fixture
def trainer(service: tinker.ServiceClient) -> tinker.TrainingClient:
    return service.create_lora_training_client("tiny", rank=4, seed=0).result()


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
    return [each["logprobs"].to_torch() for each in outputs]


def test_it_trains_as_the_linearized_weights_sent_by_hand_do(service, trainer):
    data = make_data(trainer)
    by_hand = service.create_lora_training_client("tiny", rank=4, seed=0).result()
    batch = pack_data(data, trainer.get_tokenizer())
    for step in range(2):
        pending = forward_backward_regularized(trainer, make_data(trainer, pair=1), OBJECTIVE, step=step)
        trainer.optim_step(ADAM).result()  # sent before the answer of either pass is there
        metrics = pending.result().metrics

        outputs = Outputs(pack(logprobs(by_hand, data))[0])
        confidence, logic = OBJECTIVE.regularizers
        features = logic.term.prepare(batch)
        terms = [
            (evaluate_term(confidence, outputs, batch, True), 0.5),
            (evaluate_term(logic, outputs, replace(batch, features=features), True), 2.0),
        ]
        linear = linearize(evaluate_base(OBJECTIVE, outputs, batch), terms)
        weights_D = linear.loss_weights_DT.split(batch.offsets_D.diff().tolist())
        for datum, weights in zip(data, weights_D, strict=True):
            datum.loss_fn_inputs["weights"] = tinker.TensorData.from_torch(weights)
        by_hand.forward_backward(data, "cross_entropy")
        by_hand.optim_step(ADAM).result()

        assert metrics["loss:sum"] == pytest.approx(linear.metrics["loss/total"], rel=1e-6)
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
    reference_D = [each - 0.5 for each in logprobs(trainer, data)]
    pending = forward_backward_regularized(trainer, data, objective, step=1, num_steps=3, ref_logprobs_D=reference_D)
    metrics = pending.result().metrics
    assert metrics["term/test_several/value"] == pytest.approx(0.5)
    assert metrics["loss/total"] == pytest.approx(metrics["loss/base"] + 0.5 * metrics["term/test_several/value"])
    with pytest.raises(ObjectiveError, match="'test_several' needs ref_logprobs, and this flow gives topk_logprobs"):
        forward_backward_regularized(trainer, data, objective)


@regularizer("test_several", needs=("topk_logprobs", "ref_logprobs"))
def several_targets(outputs, batch):
    return (outputs.logprobs_DT - outputs.ref_logprobs_DT).mean(-1)


def test_a_policy_loss_reads_what_was_sampled(trainer):
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
    assert metrics["loss/total"] == pytest.approx(-(ratios * batch.advantages_DT).sum().item(), rel=1e-4)


def test_a_term_that_fails_is_skipped_or_refused_before_anything_is_sent(trainer):
    @regularizer("test_unreachable", "scored", prepare=unreachable)
    def term(outputs, batch):
        return batch.features

    data = make_data(trainer)
    entry = {"fn": term, "weight": 1.0, "retries": 1}
    skipping = Objective(regularizers=[{**entry, "on_error": "skip"}, {"name": "confidence"}])
    metrics = forward_backward_regularized(trainer, data, skipping).result().metrics
    assert metrics["term/test_unreachable/skipped"] == 1.0
    assert "term/confidence/value" in metrics
    with pytest.raises(ObjectiveError, match="'test_unreachable' failed preparing: it raised OSError: no way there"):
        forward_backward_regularized(trainer, data, Objective(regularizers=[entry]))
    trainer.forward(data, "cross_entropy").result()  # the client is none the worse


def unreachable(batch):
    raise OSError("no way there")
