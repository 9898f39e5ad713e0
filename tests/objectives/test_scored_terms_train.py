"""Scores from outside train a model: Z3's verdicts and Betti numbers, on the tiny model through a real engine.

A prompt may go on in six ways, three of which the term scores as bad. Cross-entropy alone learns them all alike; with
the term, what it scores moves as it asks: under the model's own distribution, in likelihood, and in what the model then
samples.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import tinker
import torch

from objectives import Batch, Objective, Outputs, forward_backward_regularized, prepare_features

PROMPT, END = "q ", "#"
# Three good continuations and three bad ones. As sums, those of topology all hold; they differ in what uses what.
TEXTS = {
    "logic": ("<<2+3=5>>", "<<4+1=5>>", "<<7-2=5>>", "<<2+3=6>>", "<<4+1=7>>", "<<7-2=4>>"),
    "topology": (
        "<<1+2=3>><<3+4=7>>",
        "<<2+3=5>><<5-1=4>>",
        "<<8-2=6>><<6+3=9>>",
        "<<1+2=3>><<5+4=9>>",
        "<<2+3=5>><<8-1=7>>",
        "<<8-2=6>><<1+3=4>>",
    ),
}
NUM_SAMPLES = 64


@dataclass(frozen=True, slots=True)
class Measured:
    """What became of one model.

    Attributes:
        expected: the score that the term gives a text drawn from the model's own distribution over the six.
        margin: nats: how much likelier a good text is than a bad one, in the mean.
        sampled: the mean score of texts that the model sampled, those that it cannot score among them, as 0.
        good: mean logprob of a token of a good text, nats.
        bad: the same of a bad one.
    """

    expected: float
    margin: float
    sampled: float
    good: float
    bad: float


@pytest.fixture(scope="module")
def service(engine_url: str) -> tinker.ServiceClient:
    return tinker.ServiceClient(base_url=engine_url, api_key="tml-test")


def scores(name: str, texts: tuple[str, ...]) -> list[float]:
    """The term's own scores of texts."""
    (bound,) = Objective(regularizers=[{"name": name}]).regularizers
    count = len(texts)
    batch = Batch(torch.zeros(count).long(), torch.ones(count), torch.arange(count + 1), texts_D=texts)
    score_D, _ = bound.term(Outputs(torch.zeros(count)), replace(batch, features=prepare_features(bound, batch)))
    return score_D.tolist()


def make_datum(tokenizer: Any, text: str) -> tinker.Datum:
    prompt, answer = tokenizer.encode(PROMPT), tokenizer.encode(text + END)
    tokens = prompt + answer
    weights = [0.0] * (len(prompt) - 1) + [1 / len(answer)] * len(answer)
    inputs = {"target_tokens": torch.tensor(tokens[1:]), "weights": torch.tensor(weights)}
    return tinker.Datum(model_input=tinker.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


@dataclass(frozen=True, slots=True)
class Run:
    """One model in training on the texts of a term."""

    trainer: tinker.TrainingClient
    name: str
    data: list[tinker.Datum]

    @classmethod
    def start(cls, service: tinker.ServiceClient, name: str, seed: int) -> Run:
        trainer = service.create_lora_training_client("tiny", rank=8, seed=seed).result()
        return cls(trainer, name, [make_datum(trainer.get_tokenizer(), text) for text in TEXTS[name]])

    def train(self, objective: Objective, num_steps: int) -> list[dict[str, float]]:
        """The metrics of every step."""
        metrics = []
        for step in range(num_steps):
            pending = forward_backward_regularized(self.trainer, self.data, objective, step=step, num_steps=num_steps)
            self.trainer.optim_step(tinker.AdamParams(learning_rate=5e-3)).result()
            metrics.append(pending.result().metrics)
        return metrics

    def measure(self) -> Measured:
        outputs = self.trainer.forward(self.data, "cross_entropy").result().loss_fn_outputs
        logprobs = [each["logprobs"].to_torch()[len(PROMPT) - 1 :] for each in outputs]
        sums, means = (
            [float(reduced) for reduced in (each(lp) for lp in logprobs)] for each in (torch.sum, torch.mean)
        )
        weights = [math.exp(each - max(sums)) for each in sums]
        risk = sum(w * s for w, s in zip(weights, scores(self.name, TEXTS[self.name]), strict=True)) / sum(weights)
        sampler = self.trainer.save_weights_and_get_sampling_client().result()
        tokenizer = self.trainer.get_tokenizer()
        answer = sampler.sample(
            tinker.ModelInput.from_ints(tokenizer.encode(PROMPT)),
            num_samples=NUM_SAMPLES,
            sampling_params=tinker.SamplingParams(max_tokens=24, seed=1, stop=[END]),
        ).result()
        texts = tuple(tokenizer.decode(each.tokens).removesuffix(END) for each in answer.sequences)
        return Measured(
            risk,
            sum(sums[:3]) / 3 - sum(sums[3:]) / 3,
            sum(scores(self.name, texts)) / NUM_SAMPLES,
            sum(means[:3]) / 3,
            sum(means[3:]) / 3,
        )


def with_term(name: str, weight: float) -> Objective:
    # Over means; times the number of tokens, it is the model's own distribution over the texts.
    alpha = len(TEXTS[name][0] + END)
    return Objective(regularizers=[{"name": name, "weight": weight, "params": {"alpha": alpha}}])


def check_that_the_term_moves_what_it_scores(service: tinker.ServiceClient, name: str, seed: int, steps: int) -> None:
    assert scores(name, TEXTS[name]) == [0, 0, 0, 1, 1, 1]
    trained, control = Run.start(service, name, seed), Run.start(service, name, seed)
    metrics = trained.train(with_term(name, 3.0), steps)
    control.train(Objective(), steps)
    found, without = trained.measure(), control.measure()

    assert found.expected < 0.2 < 0.3 < without.expected < 0.7, (found, without)
    assert found.margin > 1.5 > 0.7 > abs(without.margin), (found, without)
    assert found.sampled < 0.2 < 0.25 < without.sampled, (found, without)
    assert found.good > -0.5, "good texts are learned all the same: an untrained model has -5.8"
    assert metrics[-1][f"term/{name}/value"] == pytest.approx(found.expected, abs=0.1)


def test_logic_trains(service):
    check_that_the_term_moves_what_it_scores(service, "logic", seed=0, steps=60)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("name", TEXTS)
def test_terms_train_whatever_the_seed(service, name, seed):
    check_that_the_term_moves_what_it_scores(service, name, seed, steps=120)


@pytest.mark.slow
@pytest.mark.parametrize("name", TEXTS)
def test_a_long_run_does_not_run_away(service, name):
    """Ten times the weight for 600 steps: the term comes to rest, and what it does not score stays learned."""
    run = Run.start(service, name, seed=0)
    metrics = run.train(with_term(name, 30.0), 300)
    halfway = run.measure()
    metrics += run.train(with_term(name, 30.0), 300)
    found = run.measure()
    risks = [each[f"term/{name}/value"] for each in metrics]
    norms = [each[f"term/{name}/grad_norm"] for each in metrics]
    assert all(0 <= risk <= 1 for risk in risks)
    assert max(risks[-100:]) < 0.1
    assert max(norms[-100:]) < 0.1 * max(norms[:50])
    assert found.bad == pytest.approx(halfway.bad, abs=0.5), "bad texts fall to a level and stay there"
    assert found.good == pytest.approx(halfway.good, abs=0.2)
    assert found.good > -0.5


@pytest.mark.slow
def test_the_plain_score_function_does_run_away(service):
    """What the estimator is for: the mean of score times likelihood, in the same run, has no floor."""

    def plain(data: list[tinker.Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        means = [lp[len(PROMPT) - 1 :].mean() for lp in logprobs]
        signs = [2 * score - 1 for score in scores("logic", TEXTS["logic"])]
        return torch.stack([sign * mean for sign, mean in zip(signs, means, strict=True)]).sum(), {}

    bounded, plainly = Run.start(service, "logic", seed=0), Run.start(service, "logic", seed=0)
    bounded.train(with_term("logic", 3.0), 600)
    plainly.train(Objective(regularizers=[{"name": "plain", "fn": plain, "weight": 3.0}]), 600)
    assert plainly.measure().bad < 10 * bounded.measure().bad
