"""Parts of batches, flagged tokens and marked texts of the report's examples."""

from __future__ import annotations

from typing import Any

import pytest
import tinker
import torch

from objectives.batch import Batch, Outputs, pack, pack_targets
from objectives.config.spec import ObjectiveSpec
from objectives.objective import Objective
from tasks.reports.examples import examples_section, marked_text
from tasks.training.candidates import first_rows, prompts_of
from tasks.training.datums import Datums
from tasks.training.examples import Example, TermFlag, data_completions, find_flags, first_prompts, take_datums
from tasks.training.held_out import EvaluatedBatch


class Letters:
    def decode(self, tokens: list[int]) -> str:
        return "".join(map(chr, tokens))


LETTERS: Any = Letters()


def batch_of(texts: list[str], prompt: int = 1) -> Batch:
    targets_D = [torch.tensor([ord(letter) for letter in text]) for text in texts]
    weights_D = [torch.tensor([0.0] * prompt + [1.0] * (len(text) - prompt)) for text in texts]
    datums = [
        tinker.Datum(model_input=tinker.ModelInput.from_ints(targets.tolist()), loss_fn_inputs={})
        for targets in targets_D
    ]
    return pack_targets(
        targets_D,
        weights_D,
        LETTERS.decode,
        datums=Datums(datums),
        sampling_logprobs_DT=pack([torch.arange(len(text)).float() for text in texts])[0],
        labels_D={"pair": torch.arange(len(texts))},
        text_labels_D={"rule": tuple(text.upper() for text in texts)},
    )


def test_taken_datums_equal_a_batch_of_them_alone() -> None:
    whole, alone = batch_of(["q?ab", "r?cdef", "s?gh"]), batch_of(["s?gh", "q?ab"])
    taken = take_datums(whole, [2, 0])
    for name in ("target_tokens_DT", "weights_DT", "offsets_D", "sampling_logprobs_DT"):
        assert getattr(taken, name).tolist() == getattr(alone, name).tolist(), name
    assert (taken.texts_D, taken.text_labels_D) == (alone.texts_D, alone.text_labels_D)
    assert taken.labels_D["pair"].tolist() == [2, 0]
    inputs = [[datum.model_input.to_ints() for datum in batch.datums] for batch in (taken, alone)]
    assert inputs[0] == inputs[1]


def test_first_prompts_takes_one_datum_of_each_prompt() -> None:
    def evaluated(texts: list[str]) -> EvaluatedBatch:
        batch = batch_of(texts)
        return EvaluatedBatch(batch, torch.zeros(batch.num_tokens))

    batches = first_prompts([evaluated(["qab", "qcd", "ref"]), evaluated(["sgh", "tij"])], 3)
    assert [batch.texts_D for batch in batches] == [("ab", "ef"), ("gh",)]


def test_a_datum_whose_completion_was_cut_off_has_no_prompt() -> None:
    """Its only known token would be the prompt of unconditional samples."""
    batch = batch_of(["q", "qab", "r", "sgh"])
    assert first_rows(batch) == [1, 3]
    assert len(prompts_of(batch)) == 2
    evaluated = [EvaluatedBatch(batch, torch.zeros(batch.num_tokens))]
    assert [taken.texts_D for taken in first_prompts(evaluated, 3)] == [("ab", "gh")]
    assert data_completions(evaluated, 3) == [["ab"], ["gh"]]


@pytest.mark.parametrize(
    ("spec", "text", "flagged"),
    [
        ({"name": "unlikely_tokens", "params": {"tokens": (ord("b"),)}}, "?abba", ["bb"]),
        ({"name": "unlikely_repeats", "params": {"n": 2}}, "?abcabx", ["b"]),
        ({"name": "logic"}, "?so <<1+1=3>> <<2+2=4>>", ["<<1+1=3>>"]),
        ({"name": "confidence"}, "?abba", []),
    ],
)
def test_flags_of_a_term(spec: dict[str, Any], text: str, flagged: list[str]) -> None:
    batch = batch_of([text])
    with Objective.from_spec(ObjectiveSpec.model_validate({"regularizers": [{**spec, "weight": 1.0}]})) as objective:
        (regularizer,) = objective.regularizers
        flags = find_flags(regularizer, Outputs(torch.full((batch.num_tokens,), -1.0)), batch, LETTERS)
    assert [batch.texts_D[0][flag.start : flag.end] for flag in flags] == flagged


def test_overlapping_flags_share_a_mark_and_texts_are_escaped() -> None:
    flags = [TermFlag("a", 1, 4, "x"), TermFlag("b", 3, 5, '"y"')]
    marked = ['<mark title="a: x">bc</mark>', '<mark title="a: x; b: &quot;y&quot;">d</mark>']
    marked.append('<mark title="b: &quot;y&quot;">e</mark>')
    assert marked_text("<bcdef", flags) == f"&lt;{''.join(marked)}f"


def test_section_shows_the_first_and_the_last_examples_of_the_same_prompts() -> None:
    def example(prompt: str, completion: str, score: float) -> Example:
        return Example(prompt, completion, "data", "in the data", {"logic": score})

    stored = {
        0: [example("p", "first", 1.0), example("gone", "x", 0.0)],
        5: [example("p", "middle", 0.5)],
        9: [example("p", "last", 0.25), example("other", "y", 0.0)],
    }
    section = examples_section(stored)
    assert "first" in section
    assert "last" in section
    assert "<td>logic<td>1<td>0.25" in section
    assert [text for text in ("middle", "gone", "other") if text in section] == []
    assert examples_section({}) == ""


def test_score_without_a_check_says_so() -> None:
    before = Example(
        "prompt", "no sum", scores={"logic": 0.0, "strict": 0.5, "length": 0.0}, unchecked=("logic", "strict")
    )
    after = Example("prompt", "<<1+1=2>>", scores={"logic": 0.0, "strict": 0.0, "length": 2.0})
    section = examples_section({0: [before], 4: [after]})
    assert "<td>logic<td>nothing to check<td>0" in section
    assert "<td>strict<td>0.5, nothing to check<td>0" in section
    assert "<td>length<td>0<td>2" in section
