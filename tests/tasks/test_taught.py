"""What a teacher made of a sequence: kept as it was, packed for one target or several, and behind another prompt."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path

import pytest
import torch

from engine.tiny import byte_tokenizer
from tasks.questions import QuestionGroup, QuestionsBuilder
from tasks.taught import Taught, compute_forward_kl, pack_taught
from tasks.teacher import TopK, hard_datum

DATUM = hard_datum([65, 66, 67, 68], [0.0, 0.0, 2.0, 2.0])
TOP = TopK(torch.tensor([[67, 70], [68, 71]]), torch.tensor([[0.6, 0.2], [0.3, 0.3]]))


@pytest.mark.parametrize("taught", [Taught(DATUM), Taught(DATUM, TOP), Taught(DATUM, TOP, drawn=True)])
def test_what_is_kept_is_what_was_made(taught: Taught) -> None:
    kept = Taught.of_state(json.loads(json.dumps(taught.state())))
    assert kept.drawn == taught.drawn
    before, after = (pack_taught([each], byte_tokenizer()) for each in (taught, kept))
    assert torch.equal(before.target_tokens_DT, after.target_tokens_DT)
    assert torch.equal(before.weights_DT, after.weights_DT)
    assert [each.model_input.to_ints() for each in after.datums] == [[65, 66, 67]]
    assert after.texts_D == ("CD",)


def test_the_weights_of_each_sequence_add_up_to_one() -> None:
    hard = pack_taught([Taught(DATUM), Taught(hard_datum([1, 65], [0.0, 1.0]))], byte_tokenizer())
    assert hard.weights_DT.tolist() == [0.0, 0.5, 0.5, 1.0]
    soft = pack_taught([Taught(DATUM, TOP)], byte_tokenizer())
    assert torch.allclose(soft.weights_DT, torch.tensor([[0.0, 0.0], [0.375, 0.125], [0.25, 0.25]]))
    assert soft.target_tokens_DT[1:].tolist() == TOP.tokens_MK.tolist()


def test_what_a_teacher_draws_teaches_on_the_mean_all_that_it_may_say() -> None:
    """The cross entropy of each token it may draw, weighted by how likely it is, against that over the vocabulary."""
    teacher, student = torch.randn(2, 6, generator=torch.Generator().manual_seed(0)).softmax(-1)
    likeliest = teacher.topk(3)
    top = TopK(likeliest.indices[None], likeliest.values[None])

    def learned(drawn: int) -> float:
        targets, weights = Taught(hard_datum([9, drawn], [0.0, 1.0]), top, drawn=True).arrays()
        assert len(set(targets[0].tolist())) == 3
        return float(-(weights[0] * student[targets[0]].log()).sum())

    mean = sum(float(teacher[token]) * learned(token) for token in range(6))
    assert mean == pytest.approx(float(-(teacher * student.log()).sum()), abs=1e-5)


def test_the_forward_kl_is_that_of_the_formula() -> None:
    logprobs = torch.tensor([[0.0, 0.0], [-1.0, -2.0], [-3.0, -0.5]])
    first = 0.6 * (math.log(0.6) + 1.0) + 0.4 * (math.log(0.4) - math.log(1 - math.exp(-1)))
    second = 0.3 * (math.log(0.3) + 3.0) + 0.7 * (math.log(0.7) - math.log(1 - math.exp(-3)))
    for taught in (Taught(DATUM, TOP), Taught(DATUM, TOP, drawn=True)):
        assert compute_forward_kl([taught], logprobs) == pytest.approx((first + second) / 2)


def groups(folder: Path, **params: object) -> list[QuestionGroup]:
    byte_tokenizer().save_pretrained(folder)
    (folder / "rows.jsonl").write_text('{"question": "Why?", "answer": "So."}\n')
    builder = QuestionsBuilder(path=str(folder / "rows.jsonl"), model_name_for_tokenizer=str(folder), **params)
    train, _ = asyncio.run(builder())
    return list(train.get_batch(0))


def said(group: QuestionGroup) -> tuple[str, str]:
    tokenizer = byte_tokenizer()
    return str(tokenizer.decode(group.asked.to_ints())), str(tokenizer.decode(group.shown.to_ints()))


def test_a_teacher_is_shown_a_system_message_or_another_question(tmp_path: Path) -> None:
    (plain,) = groups(tmp_path)
    asked, shown = said(plain)
    assert asked == shown == "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
    (system,) = groups(tmp_path, shown='Say {"json": 1}.')
    assert said(system) == (asked, '<|im_start|>system\nSay {"json": 1}.<|im_end|>\n' + asked)
    (demonstration,) = groups(tmp_path, shown="{question} As: {answer}")
    assert said(demonstration) == (asked, asked.replace("Why?", "Why? As: So."))
    assert said(demonstration.for_teacher())[0] == said(demonstration)[1]
