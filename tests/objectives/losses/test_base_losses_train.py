"""Client-side base losses train the tiny model on a real engine, together with a regularizer."""

from __future__ import annotations

import pytest
import tinker
import torch

from objectives import Objective, forward_backward_regularized
from objectives.losses import CLIENT_SIDE

ANSWERS = ("q: yes it is", "q: no, it is")
PROMPT = 3
PREFERENCES = ("dpo", "ipo", "simpo", "orpo", "bradley_terry", "kto")
# A single step exceeds the default KL target.
PARAMS: dict[str, dict[str, float]] = {"conservative_ppo": {"kl_target": 1.0}}
LEARNING_RATES = {"conservative_ppo": 2e-4}


@pytest.fixture(scope="module")
def service(engine_url: str) -> tinker.ServiceClient:
    return tinker.ServiceClient(base_url=engine_url, api_key="tml-test")


@pytest.fixture
def trainer(service: tinker.ServiceClient) -> tinker.TrainingClient:
    return service.create_lora_training_client("tiny", rank=4, seed=0).result()


def logprobs(trainer: tinker.TrainingClient, data: list[tinker.Datum]) -> list[torch.Tensor]:
    outputs = trainer.forward(data, "cross_entropy").result().loss_fn_outputs
    return [output["logprobs"].to_torch() for output in outputs]


def make_data(trainer: tinker.TrainingClient) -> list[tinker.Datum]:
    """Make a good and a bad completion with the current sampling logprobs and preference labels."""
    data = []
    for text in ANSWERS:
        tokens = trainer.get_tokenizer().encode(text)
        weights = torch.ones(len(tokens) - 1)
        weights[: PROMPT - 1] = 0
        inputs = {"target_tokens": torch.tensor(tokens[1:]), "weights": weights}
        data.append(tinker.Datum(model_input=tinker.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs))
    for datum, sampled, sign in zip(data, logprobs(trainer, data), (1.0, -1.0), strict=True):
        earned = sign * datum.loss_fn_inputs["weights"].to_torch()
        more = {"logprobs": sampled, "advantages": earned, "values": 0 * earned, "returns": earned}
        more |= {"label:pair": torch.tensor(0), "label:desirable": torch.tensor(int(sign > 0))}
        datum.loss_fn_inputs.update({key: tinker.TensorData.from_torch(value) for key, value in more.items()})
    return data


@pytest.mark.parametrize("name", [*CLIENT_SIDE, *PREFERENCES])
def test_training_raises_good_completions_relative_to_bad_ones(trainer, name):
    data = make_data(trainer)
    before = logprobs(trainer, data)
    objective = Objective({"name": name, "params": PARAMS.get(name, {})}, [{"name": "confidence", "weight": 0.01}])
    metrics = []
    for step in range(6):
        pending = forward_backward_regularized(trainer, data, objective, step=step, ref_logprobs_D=before)
        trainer.optim_step(tinker.AdamParams(learning_rate=LEARNING_RATES.get(name, 2e-3))).result()
        metrics.append(pending.result().metrics)
    after = logprobs(trainer, data)
    good, bad = (float((new - old)[PROMPT - 1 :].sum()) for new, old in zip(after, before, strict=True))
    assert good - bad > 0.5
    assert metrics[-1]["loss/base"] < metrics[0]["loss/base"]
    assert 0 < metrics[0]["term/confidence/grad_share"] < 0.5
