"""Balancing rules on terms that conflict: values on held-out text after the same short training of SmolLM2-135M.

The base loss fits solutions of GSM8K. Three terms oppose it and each other: `l2` lowers the probability of likely
tokens, `sparsity` moves probabilities away from 1/2, and `unlikely_repeats` lowers tokens that repeat an n-gram. Each
rule starts from the same adapter and trains on the same batches.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from statistics import mean
from time import perf_counter

import tinker
import torch
from rich.table import Table
from tinker import types
from torch import Tensor
from tqdm import tqdm

from benchmarks.rows import spread
from benchmarks.scratch import scratch_home, solutions
from blocks.servers.processes import local_engine
from objectives.batch import Batch
from objectives.config.spec import ObjectiveSpec
from objectives.evaluate import evaluate_base, evaluate_term, prepare_features
from objectives.gradients.balance import Balance, balance_weights
from objectives.objective import Objective
from objectives.sdk.training_loop import forward_backward_regularized
from tasks.training.datums import pack_datums
from tasks.training.forward_backward import enqueue_forward, read_outputs

SEED = 0
ADAM = tinker.AdamParams(learning_rate=3e-4, beta1=0.9, beta2=0.95, eps=1e-8)
TERMS = (
    {"name": "l2", "weight": 1.0, "params": {"of": "probabilities"}},
    {"name": "sparsity", "weight": 2.0},
    {"name": "unlikely_repeats", "weight": 0.1, "params": {"n": 3}},
)
NAMES = ("base", *(str(term["name"]) for term in TERMS))
METHODS = ("upgrad", "dualproj", "cagrad", "mgda", "imtl_g", "aligned_mtl", "pcgrad", "random", "gradnorm")


@dataclass(frozen=True, slots=True)
class Arm:
    """Training with one rule.

    Attributes:
        name: the rule; "none" without balancing.
        values: value of the base loss and of each term on the held-out batch, after the last step.
        opposed: share of the steps at which the total gradient has a negative scalar product, by more than rounding,
            with that of the base loss or a term.
        rule_ms: milliseconds that the rule takes, one figure per step.
        cosines: mean cosine of each pair of gradients over the steps.
    """

    name: str
    values: Sequence[float]
    opposed: float
    rule_ms: Sequence[float] = ()
    cosines: Mapping[str, float] = field(default_factory=dict)


def measure(
    *,
    model: str = "smollm2-135m",
    steps: int = 24,
    num_datums: int = 4,
    num_tokens: int = 64,
    methods: Sequence[str] = METHODS,
) -> Table:
    """Return a table of the arms, the first of which is the model before training."""
    arms: list[Arm] = []
    with (
        scratch_home(),
        local_engine(model=model, dtype="float32", threads=torch.get_num_threads()) as service,
        service.get_client() as session,
    ):
        untrained = _new_client(session, model)
        tokenizer = untrained.get_tokenizer()
        data = [_normalize(datum, num_datums) for datum in solutions(tokenizer, num_datums * 9, num_tokens)]
        train, held_out = data[: 8 * num_datums], pack_datums(data[8 * num_datums :], tokenizer)
        batches = [train[i : i + num_datums] for i in range(0, len(train), num_datums)]
        arms.append(Arm("before training", _values(untrained, held_out), 0.0))
        for method in tqdm(("none", *methods), desc="balance"):
            arms.append(_train(_new_client(session, model), method, batches, held_out, steps))
    return _table(arms, f"{model}, {steps} steps of {num_datums} x {num_tokens} tokens, terms {json.dumps(TERMS)}")


def _new_client(session: tinker.ServiceClient, model: str) -> tinker.TrainingClient:
    return session.create_lora_training_client(model, rank=8, seed=SEED).result()


def _normalize(datum: tinker.Datum, num_datums: int) -> tinker.Datum:
    """Divide the weights, so that the base loss of a batch is a mean over its tokens, like the terms."""
    weights = datum.loss_fn_inputs["weights"].to_torch()
    normalized = types.TensorData.from_torch(weights / weights.sum() / num_datums)
    return types.Datum(model_input=datum.model_input, loss_fn_inputs={**datum.loss_fn_inputs, "weights": normalized})


def _objective(method: str) -> Objective:
    balance = None if method == "none" else {"method": method}
    return Objective.from_spec(ObjectiveSpec.model_validate({"regularizers": TERMS, "balance": balance}), SEED)


def _train(
    client: tinker.TrainingClient,
    method: str,
    batches: Sequence[Sequence[tinker.Datum]],
    held_out: Batch,
    steps: int,
) -> Arm:
    opposed, rule_ms, cosines = [], [], []
    # The rule is timed on a copy, because it has a state.
    with _objective(method) as objective, _objective(method) as timing_copy:
        for step in range(steps):
            data = batches[step % len(batches)]
            pending = forward_backward_regularized(client, data, objective, step=step, num_steps=steps)
            updated = client.optim_step(ADAM)
            metrics = pending.result().metrics
            updated.result()
            products_KK = _scalar_products(metrics)
            cosines.append(_cosines(metrics))
            opposed.append(float(_opposes(metrics, products_KK)))
            if timing_copy.balance:
                rule_ms.append(_rule_ms(timing_copy.balance, metrics, products_KK, step))
    means = {pair: mean(step[pair] for step in cosines) for pair in cosines[0]}
    return Arm(method, _values(client, held_out), mean(opposed), rule_ms, means)


def _cosines(metrics: Mapping[str, float]) -> dict[str, float]:
    """Cosine of each pair of gradients of a step."""
    return {
        f"{first}/{second}": metrics[f"term/{second}/cosine_to_base" if first == "base" else f"cosine/{first}/{second}"]
        for first, second in combinations(NAMES, 2)
    }


def _scalar_products(metrics: Mapping[str, float]) -> Tensor:
    """Scalar products of the unweighted gradients of a step, from its metrics."""
    norms_K = torch.tensor([metrics[f"term/{name}/grad_norm"] for name in NAMES], dtype=torch.float64)
    cosines_KK = torch.eye(len(NAMES), dtype=torch.float64)
    for (a, b), cosine in zip(combinations(range(len(NAMES)), 2), _cosines(metrics).values(), strict=True):
        cosines_KK[a, b] = cosines_KK[b, a] = cosine
    return norms_K[:, None] * cosines_KK * norms_K


def _opposes(metrics: Mapping[str, float], products_KK: Tensor) -> bool:
    """Check whether a step increases the base loss or a term to first order, by more than rounding."""
    weights = [metrics.get(f"term/{name}/weight_balanced", metrics[f"term/{name}/weight"]) for name in NAMES]
    weights_K = torch.tensor(weights, dtype=torch.float64)
    norms_K = products_KK.diagonal().sqrt()
    return bool(((products_KK @ weights_K) / norms_K).min() < -1e-3 * (weights_K.abs() * norms_K).sum())


def _rule_ms(balance: Balance, metrics: Mapping[str, float], products_KK: Tensor, step: int) -> float:
    rows = [(name, metrics[f"term/{name}/value"]) for name in NAMES]
    weights_K = torch.tensor([metrics[f"term/{name}/weight"] for name in NAMES], dtype=torch.float64)
    started = perf_counter()
    balance_weights(balance, rows, weights_K, products_KK, step)
    return 1000 * (perf_counter() - started)


def _values(client: tinker.TrainingClient, batch: Batch) -> list[float]:
    """Value of the base loss and of each term on a batch."""
    outputs = read_outputs(enqueue_forward(client, batch).result(), batch)
    with _objective("none") as objective:
        values = [evaluate_base(objective.base, outputs, batch).value]
        for term in objective.regularizers:
            prepared = replace(batch, features=prepare_features(term, batch)) if term.term.prepare else batch
            values.append(evaluate_term(term, outputs, prepared, first_step=False).value)
    return values


def _table(arms: Sequence[Arm], title: str) -> Table:
    result = Table(title=f"balance: values on held-out text; {title}", title_justify="left", caption_justify="left")
    cosines = ", ".join(f"{pair} {cosine:.2f}" for pair, cosine in arms[1].cosines.items())
    result.caption = f"mean cosines without balancing: {cosines}"
    for column in ("balance", *NAMES, "steps opposing a term", "rule, ms"):
        result.add_column(column, justify="left" if column == "balance" else "right")
    for arm in arms:
        values = [f"{value:.4f}" for value in arm.values]
        opposed = "" if arm.name == "before training" else f"{arm.opposed:.0%}"
        result.add_row(arm.name, *values, opposed, spread(arm.rule_ms) if arm.rule_ms else "")
    return result
