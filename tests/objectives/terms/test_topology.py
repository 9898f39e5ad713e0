from __future__ import annotations

import itertools
import math
from dataclasses import replace
from fractions import Fraction
from typing import cast

import networkx as nx
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from ragged_batches import SOLUTIONS, make_batch
from test_evaluate import bind

from objectives import ObjectiveError, prepare_features
from objectives.terms.text.annotations import Solution, evaluate_program, read_solution
from objectives.terms.text.topology import MAX_POINTS, Graph, Shape, betti_numbers, compute_shape, topology


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("", Shape(0, 0, 0)),
        ("no annotation", Shape(0, 0, 0)),
        ("#### 5", Shape(1, 0, 1)),
        ("<<1+2=3>>", Shape(1, 0, 1)),
        ("<<1+2=3>> #### 3", Shape(1, 0, 2)),
        ("<<1+2=3>> #### 4", Shape(2, 0, 2)),
        ("<<1+2=3>> <<3*5=15>> #### 15", Shape(1, 0, 3)),
        ("<<1+2=3>> <<4*5=20>> #### 20", Shape(2, 0, 3)),
        ("<<1+2=3>> <<1+4=5>> #### 5", Shape(2, 0, 3)),  # a shared input connects no steps
        ("<<1+2=3>> <<3*5=15>> <<3+15=18>> #### 18", Shape(1, 1, 4)),  # two paths from 3 to 18
        (
            "<<1+2=3>> <<4+5=9>> <<6+7=13>> <<3+9=12>> <<12+13=25>> #### 25",
            Shape(1, 0, 6, 4),
        ),  # 9 and 13 wait 2 steps each
        ("<<1+2=3>> <<3+3=6>> #### 6", Shape(1, 0, 3)),
        ("<<1+2=3.00>> <<3+1=4>> #### 4.0", Shape(1, 0, 3)),
        ("<<1-8=-7>> <<-7+9=2>> #### 2", Shape(1, 0, 3)),
        ("<<10/50=20%>> <<20%*30=6>> #### 6", Shape(1, 0, 3)),
        ("<<50*2=100>> <<20%*30=6>> #### 6", Shape(2, 0, 3, 0)),  # 20 % is one number, without a 100
        ("<<5=5>> <<5=5>> #### 5", Shape(1, 0, 3)),
        ("<<1/0=3>> <<x+1=x>> #### 3", Shape(2, 0, 3)),
    ],
)
def test_shapes(text, shape):
    assert compute_shape(read_solution(text)) == shape


def slow_shape(solution: Solution) -> Shape:
    """Reference: the same graph in networkx, and Euler's formula."""
    graph = nx.Graph()
    makers: dict[Fraction, object] = {}
    for index, step in enumerate(solution.steps):
        graph.add_node(("step", index))
        for place, number in enumerate(step.left):
            if isinstance(number, Fraction):
                graph.add_edge(("step", index), makers.get(number, ("given", index, place)))
        result = evaluate_program(step.right)
        if result is not None:
            makers[result] = ("step", index)
    if solution.answer is not None:
        graph.add_node("answer")
        if solution.answer in makers:
            graph.add_edge("answer", makers[solution.answer])
    components = nx.number_connected_components(graph)
    cycles = graph.number_of_edges() - graph.number_of_nodes() + components
    return Shape(components, cycles, len(solution.steps) + (solution.answer is not None), slow_persistence(solution))


def slow_persistence(solution: Solution) -> int:
    """Reference with components as sets of steps: if a step merges several, all but the oldest die."""
    pieces: list[set[int]] = []
    makers: dict[Fraction, int] = {}
    total = 0
    lines = [(step.left, evaluate_program(step.right)) for step in solution.steps]
    if solution.answer is not None:
        lines.append(((solution.answer,), None))
    for time, (used, result) in enumerate(lines):
        used_steps = {makers[number] for number in used if isinstance(number, Fraction) and number in makers}
        merged = sorted((piece for piece in pieces if piece & used_steps), key=min)
        total += sum(time - min(piece) for piece in merged[1:])
        pieces = [piece for piece in pieces if piece not in merged] + [{time}.union(*merged)]
        if result is not None:
            makers[result] = time
    return total


@given(st.lists(st.tuples(*[st.integers(0, 5)] * 4), max_size=12), st.integers(0, 5))
def test_gudhi_agrees_with_networkx(steps, answer):
    text = "".join(f"<<{a}+{b}*{c}={result}>>" for a, b, c, result in steps)
    solution = read_solution(f"{text} #### {answer}")
    assert compute_shape(solution) == slow_shape(solution)


def test_scores_and_metrics():
    texts = ["<<1+2=3>> <<3*5=15>> #### 15", "<<1+2=3>> <<4*5=20>> #### 20", "<<1+2=3>> <<4*5=20>> #### 7", ""]
    batch, outputs = make_batch([1] * 4, texts=texts)
    scores_D, metrics = topology(outputs, replace(batch, features=betti_numbers(batch)))
    assert scores_D.tolist() == [0.0, 0.5, 1.0, 0.0]
    assert metrics == {
        "beta_0_mean": 1.5,
        "beta_1_mean": 0.0,
        "persistence_mean": 0.0,
        "disconnected": 0.5,
        "checked": 3,
        "truncated": 0,
    }


def read_points(text: str) -> list[list[float]]:
    """One point per line."""
    return [[float(number) for number in line.split()] for line in text.splitlines()]


def read_claims(text: str) -> Graph:
    """Claims ``b from a``: nodes in order, an edge per derivation."""
    edges = tuple(tuple(line.split(" from ")) for line in text.splitlines() if " from " in line)
    return Graph(tuple(dict.fromkeys(line.split(" from ")[0] for line in text.splitlines())), edges)


def read_nothing(text: str) -> str:
    return "nothing"


def repeated(text: str) -> Graph:
    return Graph(("a", "a"), ())


def dangling(text: str) -> Graph:
    return Graph(("a",), (("a", "b"),))


POINTS, CLAIMS = f"{__name__}:read_points", f"{__name__}:read_claims"
SQUARE = "0 0\n1 0\n1 1\n0 1"
ONE_PIECE = {"components": [[0, 1]], "cycles": []}


def shapes(texts: list[str], **params: object) -> list[Shape]:
    bound = bind("topology", params=params)
    return cast(list[Shape], prepare_features(bound, make_batch([1] * len(texts), texts=texts)[0]))


def test_points_are_joined_up_to_the_distance():
    assert shapes([SQUARE, "0 0\n1 0\n5 0", "3 3", ""], extractor=POINTS, max_distance=1.2) == [
        Shape(1, 1, 4, 3.0),  # the diagonals are longer
        Shape(2, 0, 3, 1.0),
        Shape(1, 0, 1),
        Shape(0, 0, 0),
    ]
    assert shapes([SQUARE], extractor=POINTS, max_distance=1.5) == [Shape(1, 0, 4, 3.0)]
    circle = "\n".join(f"{math.cos(angle / 6 * math.pi)} {math.sin(angle / 6 * math.pi)}" for angle in range(12))
    assert shapes([circle], extractor=POINTS, max_distance=1.0)[0].cycles == 1


@given(st.lists(st.tuples(st.floats(-3, 3), st.floats(-3, 3)), min_size=1, max_size=12), st.floats(0.5, 4.0))
def test_points_agree_with_a_minimum_spanning_tree(points, max_distance):
    """Reference: components die at the edges of the minimum spanning tree."""
    graph = nx.Graph()
    graph.add_nodes_from(range(len(points)))
    for i, j in itertools.combinations(range(len(points)), 2):
        graph.add_edge(i, j, weight=math.dist(points[i], points[j]))
    deaths = [data["weight"] for _, _, data in nx.minimum_spanning_edges(graph)]
    assume(all(abs(death - max_distance) > 1e-6 for death in deaths))
    text = "\n".join(f"{x!r} {y!r}" for x, y in points)
    (shape,) = shapes([text], extractor=POINTS, max_distance=max_distance)
    merged = [death for death in deaths if death <= max_distance]
    assert (shape.components, shape.steps) == (len(points) - len(merged), len(points))
    assert shape.persistence == pytest.approx(sum(merged), abs=1e-6)


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), max_size=20))
def test_graphs_agree_with_networkx(pairs):
    edges = [(a, b) for a, b in pairs if a != b]
    graph = nx.Graph(edges)
    graph.add_nodes_from(range(8))
    shape = _shape_of(Graph(tuple(range(8)), tuple(edges)))
    assert shape.components == nx.number_connected_components(graph)
    assert shape.cycles == graph.number_of_edges() - 8 + shape.components


def _shape_of(graph: Graph) -> Shape:
    text = "\n".join([*map(str, graph.nodes), *(f"{a} from {b}" for a, b in graph.edges)])
    return shapes([text], extractor=CLAIMS)[0]


@pytest.mark.parametrize(
    ("text", "params", "distance"),
    [
        # Three of four points die at 1 of 2, half of 1/2 each; the cycle lives from 1 to sqrt(2) of 2.
        (SQUARE, {"extractor": POINTS, "max_distance": 2.0, "target": ONE_PIECE}, 3 / 4 + (math.sqrt(2) - 1) / 4),
        (SQUARE, {"extractor": POINTS, "max_distance": 2.0, "target": {"components": [[0, 1]]}}, 3 / 4),
        # The cycle that is observed, [1/2, 0.707], is matched with the wanted one.
        (SQUARE, {"extractor": POINTS, "max_distance": 2.0, "target": {"cycles": [[0.5, 0.8]]}}, 0.8 - math.sqrt(0.5)),
        # Matching [0, 1] with [0, 1] and dropping [0, 0.2] is cheaper than the other way round.
        ("0\n0.4", {"extractor": POINTS, "max_distance": 2.0, "target": {"components": [[0, 1]]}}, 0.1),
        ("", {"extractor": POINTS, "max_distance": 2.0, "target": {"components": [[0, 1], [0, 0.5]]}}, 0.75),
        # Four claims in a row: one component, born at 0.
        ("a\nb from a\nc from b\nd from c", {"extractor": CLAIMS, "target": ONE_PIECE}, 0.0),
        # The second claim starts a component, born at 1/4, which merges with the first at 3/4.
        ("a\nb\nc from a\nd from b\nd from c", {"extractor": CLAIMS, "target": ONE_PIECE}, 1 / 4),
        # A cycle appears at 2/3 and stays.
        ("a\nb from a\nc from a\nc from b", {"extractor": CLAIMS, "target": ONE_PIECE}, 1 / 6),
        # A second result of two steps, born at 2/3 with the answer of another number.
        ("<<1+2=3>> <<3*5=15>> #### 7", {"target": ONE_PIECE}, 1 / 6),
    ],
)
def test_distance_to_a_target_by_hand(text, params, distance):
    (shape,) = shapes([text], **params)
    assert shape.distance == pytest.approx(distance, abs=1e-6)


def matched_distance(diagram: list[tuple[float, float]], other: list[tuple[float, float]]) -> float:
    """Reference: the cheapest of all matchings, by enumeration."""
    unmatched = [(death - birth) / 2 for birth, death in diagram], [(death - birth) / 2 for birth, death in other]
    costs = []
    for size in range(min(len(diagram), len(other)) + 1):
        for left in itertools.combinations(range(len(diagram)), size):
            for right in itertools.permutations(range(len(other)), size):
                pairs = [
                    max(abs(diagram[i][0] - other[j][0]), abs(diagram[i][1] - other[j][1]))
                    for i, j in zip(left, right, strict=True)
                ]
                rest = [cost for i, cost in enumerate(unmatched[0]) if i not in left]
                rest += [cost for j, cost in enumerate(unmatched[1]) if j not in right]
                costs.append(sum(pairs) + sum(rest))
    return min(costs)


INTERVALS = st.lists(
    st.tuples(st.integers(0, 9), st.integers(1, 10)).map(lambda pair: (pair[0] / 10, (pair[0] + pair[1]) / 20 + 0.5)),
    max_size=3,
)


@given(st.lists(st.floats(0.01, 1.9), min_size=1, max_size=3), INTERVALS)
def test_distances_agree_with_enumeration(gaps, wanted):
    """Points on a line: a component dies at each gap."""
    wanted = [(birth, min(1.0, death)) for birth, death in wanted]
    places = list(itertools.accumulate(gaps, initial=0.0))
    target = {"components": wanted}
    (shape,) = shapes(["\n".join(map(repr, places))], extractor=POINTS, max_distance=2.0, target=target)
    assert shape.distance == pytest.approx(
        matched_distance([(0, 1), *((0, gap / 2) for gap in gaps)], wanted), abs=1e-5
    )


def test_the_score_is_the_distance_to_the_target():
    texts = ["a\nb from a", "a\nb"]
    batch, outputs = make_batch([1] * 2, texts=texts)
    features = shapes(texts, extractor=CLAIMS, target=ONE_PIECE)
    scores_D, metrics = topology(outputs, replace(batch, features=features))
    assert scores_D.tolist() == pytest.approx([0.0, 0.25])  # the second component lives from 1/2 on
    assert metrics["distance_mean"] == pytest.approx(0.125)


def test_large_clouds_are_cut_and_counted():
    line = "\n".join(map(str, range(MAX_POINTS + 5)))
    (shape,) = shapes([line], extractor=POINTS, max_distance=1.0)
    assert (shape.steps, shape.truncated) == (MAX_POINTS, True)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"extractor": POINTS}, r"returns a point cloud, which needs max_distance"),
        ({"extractor": CLAIMS, "max_distance": 1.0}, r"max_distance is 1, but .* returns a graph"),
        ({"max_distance": 1.0}, r"max_distance is 1, but the extractor 'gsm8k' returns a graph"),
        ({"extractor": f"{__name__}:read_nothing"}, r"returned 'nothing'; return a Solution, a Graph, or a finite"),
        ({"extractor": f"{__name__}:repeated"}, r"a node of the graph \('a', 'a'\) occurs twice"),
        ({"extractor": f"{__name__}:dangling"}, r"the edge \('a', 'b'\) is not a pair of nodes"),
        ({"target": {}}, r"'target' is \{\}"),
        ({"target": {"components": [[0.5, 0.5]]}}, r"\[0.5, 0.5\] does not satisfy 0 <= birth < death <= 1"),
        ({"target": {"holes": []}}, r"'components' or 'cycles'"),
    ],
)
def test_a_wrong_parameter_or_extractor_names_the_problem(params, message):
    with pytest.raises(ObjectiveError, match=message):
        shapes(["0 0\n1 1"], **params)


def test_real_solutions_are_mostly_connected_and_corrupted_ones_are_not():
    clean = [compute_shape(read_solution(text)) for text in SOLUTIONS]
    torn = [compute_shape(read_solution(spoil(text))) for text in SOLUTIONS]
    assert clean == [slow_shape(read_solution(text)) for text in SOLUTIONS]
    share_of = [sum(shape.components > 1 for shape in shapes) / len(SOLUTIONS) for shapes in (clean, torn)]
    assert share_of[0] < 0.15
    assert share_of[1] > 0.85
    assert all(after.components >= before.components for before, after in zip(clean, torn, strict=True))


def spoil(text: str) -> str:
    """Insert a 9 before the result of the first annotation."""
    before, mark, after = text.partition("<<")
    return before + mark + after.replace("=", "=9", 1)
