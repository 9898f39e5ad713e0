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
TOP = TopK(torch.tensor([[67, 70], [68, 71]]), torch.tensor([[0.75, 0.25], [0.5, 0.5]]))


@pytest.mark.parametrize("top", [None, TOP])
def test_what_is_kept_is_what_was_made(top: TopK | None) -> None:
    kept = json.loads(json.dumps(Taught(DATUM, top).state()))
    before, after = (pack_taught([each], byte_tokenizer()) for each in (Taught(DATUM, top), Taught.of_state(kept)))
    assert torch.equal(before.target_tokens_DT, after.target_tokens_DT)
    assert torch.equal(before.weights_DT, after.weights_DT)
    assert [each.model_input.to_ints() for each in after.datums] == [[65, 66, 67]]
    assert after.texts_D == ("CD",)


def test_the_weights_of_each_sequence_add_up_to_one() -> None:
    hard = pack_taught([Taught(DATUM), Taught(hard_datum([1, 65], [0.0, 1.0]))], byte_tokenizer())
    assert hard.weights_DT.tolist() == [0.0, 0.5, 0.5, 1.0]
    soft = pack_taught([Taught(DATUM, TOP)], byte_tokenizer())
    assert soft.weights_DT.tolist() == [[0.0, 0.0], [0.375, 0.125], [0.25, 0.25]]
    assert soft.target_tokens_DT[1:].tolist() == TOP.tokens_MK.tolist()


def test_the_forward_kl_is_that_of_the_formula() -> None:
    soft = pack_taught([Taught(DATUM, TOP)], byte_tokenizer())
    logprobs = torch.tensor([[0.0, 0.0], [-1.0, -2.0], [-3.0, -0.5]])
    first = 0.75 * (math.log(0.75) + 1.0) + 0.25 * (math.log(0.25) + 2.0)
    second = 0.5 * (math.log(0.5) + 3.0) + 0.5 * (math.log(0.5) + 0.5)
    assert compute_forward_kl(soft, logprobs) == pytest.approx((first + second) / 2)


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
