from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ragged_batches import SOLUTIONS, make_batch

from objectives.terms.annotations import Solution, read_solution, value_of
from objectives.terms.topology import Shape, betti_numbers, shape_of, topology


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
        ("<<1+2=3>> <<1+4=5>> #### 5", Shape(2, 0, 3)),  # a shared input joins nothing
        ("<<1+2=3>> <<3*5=15>> <<3+15=18>> #### 18", Shape(1, 1, 4)),  # two ways from 3 to 18
        ("<<1+2=3>> <<4+5=9>> <<6+7=13>> <<3+9=12>> <<12+13=25>> #### 25", Shape(1, 0, 6, 4)),  # 9 lay 2 steps, 13 too
        ("<<1+2=3>> <<3+3=6>> #### 6", Shape(1, 0, 3)),
        ("<<1+2=3.00>> <<3+1=4>> #### 4.0", Shape(1, 0, 3)),
        ("<<1-8=-7>> <<-7+9=2>> #### 2", Shape(1, 0, 3)),
        ("<<5=5>> <<5=5>> #### 5", Shape(1, 0, 3)),
        ("<<1/0=3>> <<x+1=x>> #### 3", Shape(2, 0, 3)),
    ],
)
def test_shapes(text, shape):
    assert shape_of(read_solution(text)) == shape


def slow_shape(solution: Solution) -> Shape:
    """The twin: the same graph in networkx, and Euler's formula."""
    graph = nx.Graph()
    makers: dict[Fraction, object] = {}
    for index, step in enumerate(solution.steps):
        graph.add_node(("step", index))
        for place, number in enumerate(step.left):
            if isinstance(number, Fraction):
                graph.add_edge(("step", index), makers.get(number, ("given", index, place)))
        result = value_of(step.right)
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
    """Pieces as sets of steps: where a step uses several, all but the oldest end."""
    pieces: list[set[int]] = []
    makers: dict[Fraction, int] = {}
    total = 0
    lines = [(step.left, value_of(step.right)) for step in solution.steps]
    if solution.answer is not None:
        lines.append(((solution.answer,), None))
    for time, (used, result) in enumerate(lines):
        found = {makers[number] for number in used if isinstance(number, Fraction) and number in makers}
        met = sorted((piece for piece in pieces if piece & found), key=min)
        total += sum(time - min(piece) for piece in met[1:])
        pieces = [piece for piece in pieces if piece not in met] + [{time}.union(*met)]
        if result is not None:
            makers[result] = time
    return total


@given(st.lists(st.tuples(*[st.integers(0, 5)] * 4), max_size=12), st.integers(0, 5))
def test_gudhi_agrees_with_networkx(steps, answer):
    text = "".join(f"<<{a}+{b}*{c}={result}>>" for a, b, c, result in steps)
    solution = read_solution(f"{text} #### {answer}")
    assert shape_of(solution) == slow_shape(solution)


def test_scores_and_metrics():
    texts = ["<<1+2=3>> <<3*5=15>> #### 15", "<<1+2=3>> <<4*5=20>> #### 20", "<<1+2=3>> <<4*5=20>> #### 7", ""]
    batch, outputs = make_batch([1] * 4, texts=texts)
    scores_D, metrics = topology(outputs, replace(batch, features=betti_numbers(batch)))
    assert scores_D.tolist() == [0.0, 0.5, 1.0, 0.0]
    assert metrics == {"beta_0_mean": 1.5, "beta_1_mean": 0.0, "persistence_mean": 0.0, "disconnected": 0.5}


def test_real_solutions_are_mostly_one_piece_and_a_wrong_result_tears_them():
    clean = [shape_of(read_solution(text)) for text in SOLUTIONS]
    torn = [shape_of(read_solution(spoil(text))) for text in SOLUTIONS]
    assert clean == [slow_shape(read_solution(text)) for text in SOLUTIONS]
    share_of = [sum(shape.components > 1 for shape in shapes) / len(SOLUTIONS) for shapes in (clean, torn)]
    assert share_of[0] < 0.15
    assert share_of[1] > 0.85
    assert all(after.components >= before.components for before, after in zip(clean, torn, strict=True))


def spoil(text: str) -> str:
    """The first annotation with a 9 before its result."""
    before, mark, after = text.partition("<<")
    return before + mark + after.replace("=", "=9", 1)
