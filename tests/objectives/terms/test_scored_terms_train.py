"""Scored terms train a model: `logic` and `topology` on the tiny model with a real engine.

A prompt has six continuations, three of which the term scores as bad. Cross-entropy alone learns all six alike. With
the term, the bad texts lose probability in the model's distribution, in likelihood and in samples.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import pytest
import tinker
import torch

from objectives import Batch, Objective, Outputs, forward_backward_regularized, prepare_features

PROMPT, END = "q ", "#"
# Three good and three bad continuations. All sums of topology are correct; they differ in their dependencies.
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
class Measurements:
    """Measurements of one trained model.

    Attributes:
        expected: expected score of a text drawn from the model's distribution over the six texts.
        margin: nats: mean logprob of the good texts minus that of the bad texts.
        sampled: mean score of texts that the model sampled; unscorable texts count as 0.
        good: mean logprob of a token of a good text, nats.
        bad: mean logprob of a token of a bad text, nats.
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
    """Compute the term's scores of texts."""
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
    """Training run of one model on the texts of a term."""

    trainer: tinker.TrainingClient
    name: str
    data: list[tinker.Datum]

    @classmethod
    def start(cls, service: tinker.ServiceClient, name: str, seed: int) -> Run:
        trainer = service.create_lora_training_client("tiny", rank=8, seed=seed).result()
        return cls(trainer, name, [make_datum(trainer.get_tokenizer(), text) for text in TEXTS[name]])

    def train(self, objective: Objective, num_steps: int) -> list[dict[str, float]]:
        """Train and return the metrics of every step."""
        metrics = []
        for step in range(num_steps):
            pending = forward_backward_regularized(self.trainer, self.data, objective, step=step, num_steps=num_steps)
            self.trainer.optim_step(tinker.AdamParams(learning_rate=5e-3)).result()
            metrics.append(pending.result().metrics)
        return metrics

    def measure(self) -> Measurements:
        outputs = self.trainer.forward(self.data, "cross_entropy").result().loss_fn_outputs
        logprobs = [output["logprobs"].to_torch()[len(PROMPT) - 1 :] for output in outputs]
        sums, means = (
            [float(reduced) for reduced in (reduction(lp) for lp in logprobs)] for reduction in (torch.sum, torch.mean)
        )
        weights = [math.exp(logprob_sum - max(sums)) for logprob_sum in sums]
        risk = sum(w * s for w, s in zip(weights, scores(self.name, TEXTS[self.name]), strict=True)) / sum(weights)
        sampler = self.trainer.save_weights_and_get_sampling_client().result()
        tokenizer = self.trainer.get_tokenizer()
        response = sampler.sample(
            tinker.ModelInput.from_ints(tokenizer.encode(PROMPT)),
            num_samples=NUM_SAMPLES,
            sampling_params=tinker.SamplingParams(max_tokens=24, seed=1, stop=[END]),
        ).result()
        texts = tuple(tokenizer.decode(sequence.tokens).removesuffix(END) for sequence in response.sequences)
        return Measurements(
            risk,
            sum(sums[:3]) / 3 - sum(sums[3:]) / 3,
            sum(scores(self.name, texts)) / NUM_SAMPLES,
            sum(means[:3]) / 3,
            sum(means[3:]) / 3,
        )


def with_term(name: str, weight: float) -> Objective:
    return Objective(regularizers=[{"name": name, "weight": weight}])


def check_term_lowers_its_score(service: tinker.ServiceClient, name: str, seed: int, steps: int) -> None:
    assert scores(name, TEXTS[name]) == [0, 0, 0, 1, 1, 1]
    trained, control = Run.start(service, name, seed), Run.start(service, name, seed)
    metrics = trained.train(with_term(name, 5.0), steps)
    control.train(Objective(), steps)
    treated, baseline = trained.measure(), control.measure()

    assert treated.expected < 0.2 < 0.3 < baseline.expected < 0.7, (treated, baseline)
    assert treated.margin > 1.5 > 0.7 > abs(baseline.margin), (treated, baseline)
    assert treated.sampled < 0.2 < 0.25 < baseline.sampled, (treated, baseline)
    assert treated.good > -0.5, "the good texts are not learned; an untrained model has -5.8"
    assert metrics[-1][f"term/{name}/value"] == pytest.approx(treated.expected, abs=0.1)


def test_logic_trains(service):
    check_term_lowers_its_score(service, "logic", seed=0, steps=60)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("name", TEXTS)
def test_terms_train_with_any_seed(service, name, seed):
    check_term_lowers_its_score(service, name, seed, steps=120)


@pytest.mark.slow
@pytest.mark.parametrize("name", TEXTS)
def test_a_long_run_converges(service, name):
    """Ten times the weight for 600 steps: the term converges, and the good texts stay learned."""
    run = Run.start(service, name, seed=0)
    metrics = run.train(with_term(name, 50.0), 300)
    halfway = run.measure()
    metrics += run.train(with_term(name, 50.0), 300)
    measured = run.measure()
    risks = [step_metrics[f"term/{name}/value"] for step_metrics in metrics]
    norms = [step_metrics[f"term/{name}/grad_norm"] for step_metrics in metrics]
    assert all(0 <= risk <= 1 for risk in risks)
    assert max(risks[-100:]) < 0.1
    assert median(norms[-100:]) < 0.1 * max(norms[:50])  # Adam with a constant rate overshoots at single steps
    assert measured.bad == pytest.approx(halfway.bad, abs=0.5), "the bad texts did not converge"
    assert measured.good == pytest.approx(halfway.good, abs=0.2)
    assert measured.good > -0.5


@pytest.mark.slow
def test_the_plain_score_function_diverges(service):
    """Without the estimator, the mean of score times likelihood has no lower bound in the same run."""

    def score_times_likelihood(
        data: list[tinker.Datum], logprobs: list[torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, float]]:
        means = [lp[len(PROMPT) - 1 :].mean() for lp in logprobs]
        signs = [2 * score - 1 for score in scores("logic", TEXTS["logic"])]
        return torch.stack([sign * mean for sign, mean in zip(signs, means, strict=True)]).sum(), {}

    bounded, unbounded = Run.start(service, "logic", seed=0), Run.start(service, "logic", seed=0)
    bounded.train(with_term("logic", 5.0), 600)
    unbounded.train(Objective(regularizers=[{"name": "plain", "fn": score_times_likelihood, "weight": 3.0}]), 600)
    assert unbounded.measure().bad < 10 * bounded.measure().bad
