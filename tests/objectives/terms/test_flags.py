"""Flags of the text terms, against the terms' own scores."""

from __future__ import annotations

import pytest
import torch

from objectives.batch import Batch
from objectives.terms.text.annotations import read_solution, step_spans
from objectives.terms.text.logic import check_annotations, flag_violations, logic
from objectives.terms.text.topology import compute_shape, flag_disconnected, topology

TEXTS = [
    "<<1+1=2>> then <<2*3=6>> #### 6",
    "<<1+1=3>> then <<3*3=9>> then <<9/2=4>> #### 4",
    "<<2*x=10>> so <<x=5>> but <<x=6>> #### 5",
    "<<1+2=3>> <<8*8=64>> <<64/2=32>> <<3+1=4>> #### 4",
    "<<1+2=3>> <<8*8=64>> #### 7",
    "<<1+2=3>> <<?>> <<8*8=64>>",
    "<<48/2=25>> <<48+24=72>> #### 72",
    "no steps #### 3",
    "",
]


def batch_of(text: str) -> Batch:
    return Batch(torch.tensor([1]), torch.ones(1), torch.tensor([0, 1]), (text,))


@pytest.mark.parametrize("text", TEXTS)
def test_logic_flags_as_many_annotations_as_it_counts(text: str) -> None:
    flags = flag_violations(text)
    (verdict,) = check_annotations(batch_of(text))
    assert len(flags) == verdict.violated
    assert {(flag.start, flag.end) for flag in flags} <= set(step_spans(text))


@pytest.mark.parametrize("text", TEXTS)
def test_topology_flags_steps_outside_of_the_component_of_the_answer(text: str) -> None:
    """The flagged steps alone, and the others with the answer, have together as many components as GUDHI finds."""
    solution, flagged = read_solution(text), {(flag.start, flag.end) for flag in flag_disconnected(text)}
    kept = "".join(text[slice(*span)] for span in step_spans(text) if span not in flagged)
    apart = "".join(text[slice(*span)] for span in step_spans(text) if span in flagged)
    answer = text[text.index("####") :] if "####" in text else ""
    parts = [compute_shape(read_solution(part)).components for part in (kept + answer, apart)]
    assert sum(parts) == compute_shape(solution).components
    assert parts[0] <= 1
    assert len(step_spans(text)) == len(solution.steps)


def test_other_extractors_and_constraints_have_no_known_place() -> None:
    text = TEXTS[1]
    assert flag_violations(text, extractor="assignments") == []
    assert flag_violations(text, constraints="constraints") == []
    assert flag_disconnected(text, extractor="assignments") == []


def test_the_flaggers_belong_to_their_terms() -> None:
    assert logic.flag is flag_violations
    assert topology.flag is flag_disconnected
    (flag,) = flag_violations("so <<1+1=3>>")
    assert (flag.start, flag.end) == (3, 12)
