"""Compare the effect of an update on each term, measured from the logprobs, with that computed from the parameters.

`term/<name>/effect` is the product of a term's gradient with respect to the logprobs and the change of the logprobs.
Its oracle is the product of the term's gradient with respect to the model's parameters and the change of the
parameters, which no service returns.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

import torch
from rich.table import Table
from torch import Tensor

from engine import tiny
from engine.compute.base import BaseModel
from engine.compute.lora import Adapter, LoraSpec
from engine.models import load_model
from objectives.batch import Batch, Outputs
from objectives.evaluate import evaluate_base, evaluate_term
from objectives.gradients.linearize import WeightedTerm, linearize, measure_effects
from objectives.objective import Objective
from objectives.term import BASE

LENGTHS = (12, 20, 9, 15)
TERMS = ({"name": "confidence", "weight": 0.4}, {"name": "l2", "weight": 0.05}, {"name": "sparsity", "weight": 0.3})


@dataclass(frozen=True, slots=True)
class Comparison:
    """Effects and cosines of one step, as measured by logprobs and by parameters.

    Attributes:
        effects: measured effect and its oracle, by term.
        cosines: cosine of two gradients over the logprobs and over the parameters, by pair of terms.
    """

    effects: dict[str, tuple[float, float]]
    cosines: dict[str, tuple[float, float]]


def compare(num_steps: int = 40) -> list[Comparison]:
    """Train an adapter of the tiny model and compare both measures at every step."""
    with TemporaryDirectory() as folder:
        tiny.write(Path(folder) / "tiny")
        base = BaseModel(load_model(Path(folder) / "tiny", "cpu", "float32"))
    adapter = base.new_adapter(LoraSpec(rank=4, seed=0))
    parameters = [parameter.requires_grad_() for _, parameter in adapter.named_parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=2e-3, weight_decay=0.0)
    objective = Objective(regularizers=TERMS)
    comparisons: list[Comparison] = []
    for step in range(num_steps):
        batch = _draw_batch(step % 10)
        before_DT = _logprobs(base, adapter, batch)
        outputs = Outputs(before_DT.detach())
        scale = objective.scale(batch)
        rows = [
            WeightedTerm(
                evaluate_term(term, outputs, batch, first_step=True), term.weight_at(step, num_steps), scale.token
            )
            for term in objective.regularizers
        ]
        part = linearize(evaluate_base(objective.base, outputs, batch), rows, scale=scale)
        # The rows are the base loss and the terms.
        by_logprob = {row.evaluation.name: row.evaluation.gradient_DT for row in part.rows}
        # Chain rule: the gradient with respect to the parameters is dC/dlogprobs times dlogprobs/dparameters.
        by_parameter = {
            name: _flat(torch.autograd.grad(before_DT, parameters, gradient_DT, retain_graph=True, allow_unused=True))
            for name, gradient_DT in by_logprob.items()
        }
        optimizer.zero_grad()
        # The loss weights are those of cross-entropy, -dC/dlogprobs, so this loss has the gradient of the objective C.
        (-(part.loss_weights_DT * before_DT).sum()).backward()
        start = _flat([parameter.detach().clone() for parameter in parameters])
        optimizer.step()
        change = _flat([parameter.detach() for parameter in parameters]) - start
        with torch.no_grad():
            change_DT = _logprobs(base, adapter, batch) - outputs.logprobs_DT
        measured = measure_effects([part], [change_DT])
        comparisons.append(
            Comparison(
                {
                    # The base loss is a sum over the tokens, and its effect is shown per token.
                    name: (
                        measured[f"term/{name}/effect"],
                        float(gradient @ change) / (batch.num_tokens if name == BASE else 1),
                    )
                    for name, gradient in by_parameter.items()
                },
                {
                    f"{a}/{b}": (_cosine(by_logprob[a], by_logprob[b]), _cosine(by_parameter[a], by_parameter[b]))
                    for a, b in combinations(by_logprob, 2)
                },
            )
        )
    return comparisons


def measure(*, num_steps: int = 40) -> Table:
    """Return a table of the effects on each term and the cosines of each pair of terms, by both measures.

    The row of a term has the mean effects and how often their signs agree; the row of a pair has the mean cosines.
    """
    comparisons = compare(num_steps)
    table = Table(title=f"effects: {num_steps} steps of the tiny model", title_justify="left")
    for column in ("quantity", "by logprobs", "by parameters"):
        table.add_column(column, justify="left" if column == "quantity" else "right")
    for name in comparisons[0].effects:
        pairs = [comparison.effects[name] for comparison in comparisons]
        same = fmean((a > 0) == (b > 0) for a, b in pairs)
        table.add_row(f"effect on {name}: mean; same sign in {same:.0%}", *_means(pairs, ".2e"))
    for name in comparisons[0].cosines:
        pairs = [comparison.cosines[name] for comparison in comparisons]
        table.add_row(f"cosine {name}: mean", *_means(pairs, "+.2f"))
    return table


def _means(pairs: list[tuple[float, float]], form: str) -> list[str]:
    return [format(fmean(column), form) for column in zip(*pairs, strict=True)]


def _draw_batch(seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    size = sum(LENGTHS)
    # Few different tokens, so that later batches are affected by earlier updates.
    targets = torch.randint(60, 76, (size,), generator=generator)
    return Batch(targets, torch.ones(size), torch.tensor([0, *LENGTHS]).cumsum(0))


def _logprobs(base: BaseModel, adapter: Adapter, batch: Batch) -> Tensor:
    """Compute the logprobs by plain log-softmax, with gradient with respect to the adapter's parameters."""
    parts = []
    for targets_T in batch.target_tokens_DT.split(list(LENGTHS)):
        tokens_T = torch.cat([torch.tensor([10]), targets_T[:-1]])
        with base.using(adapter):
            hidden_TH = base.hidden(tokens_T[None])[0]
            logits_TV = base.logits(hidden_TH)
        parts.append(logits_TV.float().log_softmax(-1).gather(1, targets_T[:, None])[:, 0])
    return torch.cat(parts)


def _flat(tensors: list[Tensor] | tuple[Tensor | None, ...]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors if tensor is not None]).double()


def _cosine(a: Tensor, b: Tensor) -> float:
    a, b = a.double(), b.double()
    return float(a @ b / (a.norm() * b.norm()))
