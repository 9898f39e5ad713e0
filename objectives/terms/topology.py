"""Topology: the reasoning graph of a solution should be one piece."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from itertools import count

from gudhi import SimplexTree
from torch import Tensor

from objectives.batch import Batch, Outputs
from objectives.per_datum import per_datum
from objectives.term import regularizer
from objectives.terms.annotations import Solution, value_of
from objectives.terms.extractors import ExtractorName, read_solutions


@dataclass(frozen=True, slots=True)
class Shape:
    """The Betti numbers of one reasoning graph, and how many steps, the final answer among them, it has.

    Attributes:
        persistence: how many steps the pieces that came together lay apart, added up: a piece is as old as its first
            step, and where two meet the younger one ends.
    """

    components: int
    cycles: int
    steps: int
    persistence: int = 0


@per_datum()
def betti_numbers(batch: Batch, *, extractor: ExtractorName = "gsm8k") -> list[Shape]:
    """The shape of each datum's reasoning graph."""
    return [shape_of(solution) for solution in read_solutions(batch, extractor)]


def shape_of(solution: Solution) -> Shape:
    """The shape of the reasoning graph of one solution.

    Its nodes are the steps, the final answer, and the numbers given. A step is joined to the latest earlier
    step whose result it uses; a number that no earlier step made is given, and a node of its own each time,
    since to share an input is not to use a result. The filtration is the order of the steps.

    >>> from objectives.terms.annotations import read_solution
    >>> shape_of(read_solution("<<48/2=24>> <<48+24=72>> #### 72"))
    Shape(components=1, cycles=0, steps=3, persistence=0)
    >>> shape_of(read_solution("<<1+2=3>> <<4+5=9>> <<3+9=12>> #### 12"))
    Shape(components=1, cycles=0, steps=4, persistence=1)
    >>> shape_of(read_solution("<<48/2=25>> <<48+24=72>> #### 72"))
    Shape(components=2, cycles=0, steps=3, persistence=0)
    """
    graph, new_node = SimplexTree(), count()
    makers: dict[Fraction, int] = {}

    def join(step: int, used: Fraction, time: int) -> None:
        maker = makers[used] if used in makers else next(new_node)
        graph.insert([maker, step], filtration=time)

    for time, annotation in enumerate(solution.steps):
        step = next(new_node)
        graph.insert([step], filtration=time)
        for number in annotation.left:
            if isinstance(number, Fraction):
                join(step, number, time)
        result = value_of(annotation.right)
        if result is not None:
            makers[result] = step
    if solution.answer is not None:
        answer = next(new_node)
        graph.insert([answer], filtration=len(solution.steps))
        if solution.answer in makers:
            join(answer, solution.answer, len(solution.steps))
    graph.compute_persistence(persistence_dim_max=True)
    components, cycles, *_ = [*graph.betti_numbers(), 0, 0]
    lifetimes = [end - start for start, end in graph.persistence_intervals_in_dimension(0) if end < math.inf]
    return Shape(components, cycles, len(solution.steps) + (solution.answer is not None), round(sum(lifetimes)))


@regularizer("topology", kind="scored", prepare=betti_numbers)
def topology(outputs: Outputs, batch: Batch) -> tuple[Tensor, dict[str, float]]:
    """How loose the reasoning is, ``(beta_0 - 1) / (steps - 1)``, per datum ``(D,)``, in [0, 1].

    ``beta_0`` counts the connected components of the reasoning graph (`shape_of`): the score is 0 where every
    step leads to the final answer, 1 where no step uses another. ``beta_1`` counts its independent cycles, results used
    on two ways that meet again; sound solutions have more of them, not fewer, so they are shown, not scored. So is the
    persistence of pieces that come together in the end: how long a result lies before it is used.

    Source: Edelsbrunner & Harer 2010, "Computational Topology", chapter VII; computed with GUDHI.

    Args:
        extractor: what reads the steps off a text (`objectives.terms.extractors`).

    Metrics, mean over the datums:
        beta_0_mean, beta_1_mean; persistence_mean: steps; disconnected: the share of datums with more than one
        component.
    """
    shapes: list[Shape] = batch.features
    loose = [max(0, shape.components - 1) for shape in shapes]
    scores_D = [parts / max(1, shape.steps - 1) for parts, shape in zip(loose, shapes, strict=True)]
    return outputs.logprobs_DT.new_tensor(scores_D), {
        "beta_0_mean": sum(shape.components for shape in shapes) / len(shapes),
        "beta_1_mean": sum(shape.cycles for shape in shapes) / len(shapes),
        "persistence_mean": sum(shape.persistence for shape in shapes) / len(shapes),
        "disconnected": sum(parts > 0 for parts in loose) / len(shapes),
    }
