"""Shape of a solution: its reasoning graph, a graph of the user's, or a point cloud such as embeddings."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from itertools import count
from typing import Annotated, Literal, NamedTuple

import numpy as np
from gudhi import RipsComplex, SimplexTree
from gudhi.hera import wasserstein_distance
from pydantic import AfterValidator, Field
from torch import Tensor

from objectives.batch import Batch, Outputs
from objectives.config.import_path import ImportedFunction
from objectives.errors import ObjectiveError
from objectives.term import Flag, per_datum, regularizer
from objectives.terms.text.annotations import Solution, evaluate_program, read_solution, step_spans
from objectives.terms.text.extractors import ExtractorName, extract

# Maximum number of points of a cloud; 200 points take up to a second, and the time grows with the cube.
MAX_POINTS = 200
# Relative error of Hera's distance, of the order of float32's, which scores are stored in.
_RELATIVE_ERROR = 1e-6


@dataclass(frozen=True, slots=True)
class Graph:
    """Graph that an extractor reads from a text.

    Attributes:
        nodes: distinct nodes in the order of the text.
        edges: pairs of nodes; the direction does not matter, and a loop counts as no edge.
    """

    nodes: tuple[Hashable, ...]
    edges: tuple[tuple[Hashable, Hashable], ...]


_DIMENSIONS = {"components": 0, "cycles": 1}
Diagrams = Mapping[Literal["components", "cycles"], tuple[tuple[float, float], ...]]


def _check_target(target: Diagrams) -> Diagrams:
    for birth, death in (interval for intervals in target.values() for interval in intervals):
        if not 0 <= birth < death <= 1:
            raise ValueError(f"the interval [{birth:g}, {death:g}] does not satisfy 0 <= birth < death <= 1")
    return target


Target = Annotated[Diagrams, Field(min_length=1), AfterValidator(_check_target)]


@dataclass(frozen=True, slots=True)
class Shape:
    """Topological summary of one graph or point cloud.

    Attributes:
        components: beta_0, number of connected components.
        cycles: beta_1, number of independent cycles; of a point cloud, those that no triangle of points fills.
        steps: number of steps or nodes, including the final answer; of a point cloud, of points.
        persistence: sum of the finite lifetimes of components. In a graph, the unit is a step: a component is born at
            its first step and dies at the step at which it merges with an older one. In a point cloud, the unit is a
            distance, and all components are born at 0.
        distance: distance to the target diagram; None without a target.
        truncated: True if a point cloud had more than `MAX_POINTS` points, of which the first are used.
    """

    components: int
    cycles: int
    steps: int
    persistence: float = 0
    distance: float | None = None
    truncated: bool = False


class _Filtration(NamedTuple):
    """Filtered simplicial complex.

    Attributes:
        complex: simplices with the time of their appearance.
        steps: number of steps, nodes or points.
        end: time after which nothing appears.
        truncated: see `Shape.truncated`.
    """

    complex: SimplexTree
    steps: int
    end: float
    truncated: bool = False


@per_datum(version=2)
def betti_numbers(
    batch: Batch,
    *,
    extractor: ExtractorName = "gsm8k",
    target: Target | None = None,
    max_distance: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None,
) -> list[Shape]:
    """Compute the shape of the graph or point cloud of each datum."""
    return [_shape(_build_filtration(source, extractor, max_distance), target) for source in extract(batch, extractor)]


def compute_shape(solution: Solution) -> Shape:
    """Compute the shape of the reasoning graph of one solution.

    The nodes are the steps, the final answer and the input numbers. Each number on the left side of a step connects the
    step to the latest earlier step with this result. A number without such a step is an input and becomes a new node
    each time, because two steps that share an input do not depend on each other. The filtration is the order of the
    steps.

    >>> from objectives.terms.text.annotations import read_solution
    >>> shape = compute_shape(read_solution("<<48/2=24>> <<48+24=72>> #### 72"))
    >>> shape.components, shape.cycles, shape.steps, shape.persistence
    (1, 0, 3, 0.0)
    >>> compute_shape(read_solution("<<1+2=3>> <<4+5=9>> <<3+9=12>> #### 12")).persistence
    1.0
    >>> compute_shape(read_solution("<<48/2=25>> <<48+24=72>> #### 72")).components
    2
    """
    return _shape(_filtration_of_solution(solution), None)


def flag_disconnected(text: str, /, *, extractor: ExtractorName = "gsm8k") -> list[Flag]:
    """Flag the steps that are not connected with the answer, or with the last step of a text without an answer.

    Other extractors do not say where in the text a step is, so nothing is flagged.

    >>> text = "<<1+2=3>> <<8*8=64>> <<3+1=4>> #### 4"
    >>> [text[flag.start : flag.end] for flag in flag_disconnected(text)]
    ['<<8*8=64>>']
    """
    solution = read_solution(text)
    if extractor != "gsm8k" or not solution.steps:
        return []
    components, step_of_result = _components(solution)
    last = len(solution.steps) - 1
    end = last if solution.answer is None else step_of_result.get(solution.answer)
    goal = "the answer" if solution.answer is not None else "the last step"
    return [
        Flag(*span, f"is not connected with {goal}")
        for span, component in zip(step_spans(text), components, strict=True)
        if end is None or component != components[end]
    ]


def _components(solution: Solution) -> tuple[list[int], dict[Fraction, int]]:
    """Component of each step, as `_filtration_of_solution` connects them, and the last step with each result."""
    components, step_of_result = list(range(len(solution.steps))), dict[Fraction, int]()
    for step, annotation in enumerate(solution.steps):
        for number in annotation.left:
            if isinstance(number, Fraction) and number in step_of_result:
                joined = components[step_of_result[number]]
                components = [joined if component == components[step] else component for component in components]
        result = evaluate_program(annotation.right)
        if result is not None:
            step_of_result[result] = step
    return components, step_of_result


@regularizer("topology", kind="scored", prepare=betti_numbers, flag=flag_disconnected)
def topology(outputs: Outputs, batch: Batch) -> tuple[Tensor, dict[str, float]]:
    """Disconnectedness ``(beta_0 - 1) / (steps - 1)`` in [0, 1], or distance to a target, per datum ``(D,)``.

    ``beta_0`` is the number of connected components of what ``extractor`` reads from the text:

    - A `Solution`: its reasoning graph (`compute_shape`). The score is 0 if all steps are connected and 1
      if no step uses the result of another. ``beta_1`` is the number of independent cycles, which arise when a result
      is used on two paths that meet again. Sound solutions have more cycles, so ``beta_1`` is a metric and not part of
      the score. Persistence is also a metric: the time until separate components merge.
    - A `Graph`. A node appears at its place in the order of the nodes, an edge with the later one of its nodes.
    - A point cloud: an array ``(n, d)``, as of embeddings of the sentences. Its complex is the Vietoris-Rips complex
      with Euclidean distances up to ``max_distance``, so ``beta_0`` counts clusters at this distance.

    With ``target``, the score is the distance to these persistence diagrams: the 1-Wasserstein distance with the
    maximum norm, summed over components and cycles. It is the cost of the cheapest matching of intervals, where a pair
    costs ``max(|birth - birth'|, |death - death'|)`` and an unmatched interval half of its length. Times are divided by
    the number of steps or by ``max_distance``, and a feature that never dies ends at 1. The distance of an empty graph
    or cloud is half of the total length of the target's intervals.

    Sources: Edelsbrunner & Harer 2010, "Computational Topology", chapters VII and VIII.2; computed with GUDHI and Hera.

    Args:
        extractor: name or import path of a function from a text to its `Solution`, `Graph` or point cloud
            (`objectives.terms.text.extractors`).
        target: intervals ``[birth, death]`` in [0, 1] of components, of cycles, or of both; those not named do not
            count. One component that lasts and no cycles is ``{components: [[0, 1]], cycles: []}``.
        max_distance: largest distance at which two points of a point cloud are connected; required for point clouds.

    Metrics, mean over the datums:
        beta_0_mean, beta_1_mean; persistence_mean (in steps, or in distances of a point cloud); distance_mean (only
        with a target); disconnected, the share of datums with more than one component; and two numbers of datums:
        checked, those with at least two steps, nodes or points; and truncated, point clouds that were cut to
        `MAX_POINTS`.
    """
    shapes: list[Shape] = batch.features
    extra_components = [max(0, shape.components - 1) for shape in shapes]
    scores_D = [extra / max(1, shape.steps - 1) for extra, shape in zip(extra_components, shapes, strict=True)]
    distances_D = [shape.distance for shape in shapes if shape.distance is not None]
    metrics = {
        "beta_0_mean": sum(shape.components for shape in shapes) / len(shapes),
        "beta_1_mean": sum(shape.cycles for shape in shapes) / len(shapes),
        "persistence_mean": sum(shape.persistence for shape in shapes) / len(shapes),
        "disconnected": sum(extra > 0 for extra in extra_components) / len(shapes),
        "checked": sum(shape.steps > 1 for shape in shapes),
        "truncated": sum(shape.truncated for shape in shapes),
    }
    if distances_D:
        metrics["distance_mean"] = sum(distances_D) / len(distances_D)
    return outputs.logprobs_DT.new_tensor(distances_D or scores_D), metrics


def _shape(filtration: _Filtration, target: Diagrams | None) -> Shape:
    """Compute the persistent homology of a filtration, and its distance to the target."""
    complex_, steps, end, truncated = filtration
    # By default, GUDHI leaves out the highest dimension. That of a graph has its cycles, so it is included; that of a
    # point cloud, of triangles, is not needed.
    complex_.compute_persistence(persistence_dim_max=complex_.dimension() <= 1)
    intervals = {dimension: complex_.persistence_intervals_in_dimension(dimension) for dimension in (0, 1)}
    intervals = {dimension: pairs.reshape(-1, 2) for dimension, pairs in intervals.items()}
    components, cycles = (int(np.isinf(intervals[dimension][:, 1]).sum()) for dimension in (0, 1))
    births_0, deaths_0 = intervals[0].T
    persistence = float((deaths_0 - births_0)[np.isfinite(deaths_0)].sum())
    distance = None
    if target is not None:
        distance = sum(
            _distance(np.minimum(intervals[_DIMENSIONS[feature]] / end, 1.0), np.array(diagram).reshape(-1, 2))
            for feature, diagram in target.items()
        )
    return Shape(components, cycles, steps, persistence, distance, truncated)


def _distance(diagram: np.ndarray, other: np.ndarray) -> float:
    """1-Wasserstein distance of two persistence diagrams, ``(n, 2)`` each, with the maximum norm."""
    return float(wasserstein_distance(diagram, other, order=1, internal_p=math.inf, delta=_RELATIVE_ERROR))


def _build_filtration(source: object, extractor: str | ImportedFunction, max_distance: float | None) -> _Filtration:
    """Build the filtration of what an extractor returned for one text."""
    name = str(extractor)
    if isinstance(source, Solution | Graph):
        if max_distance is not None:
            raise ObjectiveError(
                f"max_distance is {max_distance:g}, but the extractor {name!r} returns a graph, which has no "
                "distances; remove max_distance"
            )
        return _filtration_of_solution(source) if isinstance(source, Solution) else _filtration_of_graph(source)
    try:
        points = np.asarray(source, dtype=float)
    except (TypeError, ValueError):
        points = None
    if points is not None and points.size == 0:
        points = np.empty((0, 1))
    if points is None or points.ndim != 2 or not np.isfinite(points).all():
        raise ObjectiveError(
            f"the extractor {name!r} returned {str(source)[:80]!r}; return a Solution, a Graph, or a finite array "
            "of points of the shape (n, d)"
        )
    if max_distance is None:
        raise ObjectiveError(
            f"the extractor {name!r} returns a point cloud, which needs max_distance; set it to the distance "
            "below which two points belong together"
        )
    return _filtration_of_points(points, max_distance)


def _filtration_of_solution(solution: Solution) -> _Filtration:
    """Build the filtration of a reasoning graph; see `compute_shape`."""
    graph, new_node = SimplexTree(), count()
    step_of_result: dict[Fraction, int] = {}

    def connect(step: int, number: Fraction, time: int) -> None:
        source = step_of_result[number] if number in step_of_result else next(new_node)
        graph.insert([source, step], filtration=time)

    for time, annotation in enumerate(solution.steps):
        step = next(new_node)
        graph.insert([step], filtration=time)
        for number in annotation.left:
            if isinstance(number, Fraction):
                connect(step, number, time)
        result = evaluate_program(annotation.right)
        if result is not None:
            step_of_result[result] = step
    if solution.answer is not None:
        answer = next(new_node)
        graph.insert([answer], filtration=len(solution.steps))
        if solution.answer in step_of_result:
            connect(answer, solution.answer, len(solution.steps))
    steps = len(solution.steps) + (solution.answer is not None)
    return _Filtration(graph, steps, max(1, steps))


def _filtration_of_graph(graph: Graph) -> _Filtration:
    times = {node: time for time, node in enumerate(graph.nodes)}
    if len(times) != len(graph.nodes):
        raise ObjectiveError(f"a node of the graph {str(graph.nodes)[:80]} occurs twice; list each node once")
    complex_ = SimplexTree()
    for time in times.values():
        complex_.insert([time], filtration=time)
    for edge in graph.edges:
        if len(edge) != 2 or not times.keys() >= set(edge):
            raise ObjectiveError(f"the edge {edge!r} is not a pair of nodes of the graph; add its nodes to `nodes`")
        ends = [times[node] for node in edge]
        complex_.insert(ends, filtration=max(ends))
    return _Filtration(complex_, len(times), max(1, len(times)))


def _filtration_of_points(points: np.ndarray, max_distance: float) -> _Filtration:
    first = points[:MAX_POINTS]
    complex_ = RipsComplex(points=first, max_edge_length=max_distance).create_simplex_tree(max_dimension=1)
    complex_.collapse_edges()  # keeps the persistence, with far fewer triangles
    complex_.expansion(2)
    return _Filtration(complex_, len(first), max_distance, len(points) > MAX_POINTS)
