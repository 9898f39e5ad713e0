"""Teacher's sequences: serialization, packing with hard and soft targets, and separate prompts for the teacher."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path

import pytest
import torch

from blocks.errors import ConfigError
from engine.tiny import byte_tokenizer
from tasks.distillation.prompts import PromptGroup, QuestionsBuilder
from tasks.distillation.soft_targets import TeacherSequence, compute_forward_kl, pack_sequences
from tasks.training.teacher import TopK, hard_datum

DATUM = hard_datum([65, 66, 67, 68], [0.0, 0.0, 2.0, 2.0])
TOP = TopK(torch.tensor([[67, 70], [68, 71]]), torch.tensor([[0.6, 0.2], [0.3, 0.3]]))


SEQUENCES = [TeacherSequence(DATUM), TeacherSequence(DATUM, TOP), TeacherSequence(DATUM, TOP, drawn=True)]


@pytest.mark.parametrize("sequence", SEQUENCES)
def test_json_round_trip(sequence: TeacherSequence) -> None:
    restored = TeacherSequence.from_json(json.loads(json.dumps(sequence.to_json())))
    assert restored.drawn == sequence.drawn
    before, after = pack_sequences([sequence], byte_tokenizer()), pack_sequences([restored], byte_tokenizer())
    assert torch.equal(before.target_tokens_DT, after.target_tokens_DT)
    assert torch.equal(before.weights_DT, after.weights_DT)
    assert [datum.model_input.to_ints() for datum in after.datums] == [[65, 66, 67]]
    assert after.texts_D == ("CD",)


def test_weights_of_each_sequence_sum_to_one() -> None:
    sequences = [TeacherSequence(DATUM), TeacherSequence(hard_datum([1, 65], [0.0, 1.0]))]
    assert pack_sequences(sequences, byte_tokenizer()).weights_DT.tolist() == [0.0, 0.5, 0.5, 1.0]
    soft = pack_sequences([TeacherSequence(DATUM, TOP)], byte_tokenizer())
    assert torch.allclose(soft.weights_DT, torch.tensor([[0.0, 0.0], [0.375, 0.125], [0.25, 0.25]]))
    assert soft.target_tokens_DT[1:].tolist() == TOP.tokens_MK.tolist()


def test_expected_loss_of_drawn_targets_is_the_full_cross_entropy() -> None:
    """The mean over all tokens that the teacher may draw equals the cross entropy over the vocabulary."""
    teacher, student = torch.randn(2, 6, generator=torch.Generator().manual_seed(0)).softmax(-1)
    top_3 = teacher.topk(3)
    top = TopK(top_3.indices[None], top_3.values[None])

    def loss(drawn: int) -> float:
        sequence = TeacherSequence(hard_datum([9, drawn], [0.0, 1.0]), top, drawn=True)
        targets, weights = sequence.targets_and_weights()
        assert len(set(targets[0].tolist())) == 3
        return float(-(weights[0] * student[targets[0]].log()).sum())

    mean = sum(float(teacher[token]) * loss(token) for token in range(6))
    assert mean == pytest.approx(float(-(teacher * student.log()).sum()), abs=1e-5)


def test_forward_kl_equals_its_formula() -> None:
    logprobs = torch.tensor([[0.0, 0.0], [-1.0, -2.0], [-3.0, -0.5]])
    first = 0.6 * (math.log(0.6) + 1.0) + 0.4 * (math.log(0.4) - math.log(1 - math.exp(-1)))
    second = 0.3 * (math.log(0.3) + 3.0) + 0.7 * (math.log(0.7) - math.log(1 - math.exp(-3)))
    for sequence in SEQUENCES[1:]:
        assert compute_forward_kl([sequence], logprobs) == pytest.approx((first + second) / 2)


def groups(folder: Path, **params: object) -> list[PromptGroup]:
    byte_tokenizer().save_pretrained(folder)
    (folder / "rows.jsonl").write_text('{"question": "Why?", "answer": "So."}\n')
    builder = QuestionsBuilder(path=str(folder / "rows.jsonl"), model_name_for_tokenizer=str(folder), **params)
    train, _ = asyncio.run(builder())
    return list(train.get_batch(0))


def prompts(group: PromptGroup) -> tuple[str, str]:
    """Text of the student's and the teacher's prompt."""
    decode = byte_tokenizer().decode
    return str(decode(group.student_prompt.to_ints())), str(decode(group.teacher_prompt.to_ints()))


def test_teacher_sees_a_system_message_or_another_prompt(tmp_path: Path) -> None:
    (plain,) = groups(tmp_path)
    student, teacher = prompts(plain)
    assert student == teacher == "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
    (system,) = groups(tmp_path, teacher_prompt='Say {"json": 1}.')
    assert prompts(system) == (student, '<|im_start|>system\nSay {"json": 1}.<|im_end|>\n' + student)
    (demonstration,) = groups(tmp_path, teacher_prompt="{question} As: {answer}")
    assert prompts(demonstration) == (student, student.replace("Why?", "Why? As: So."))
    assert prompts(demonstration.for_teacher())[0] == prompts(demonstration)[1]


def test_a_row_without_a_field_of_the_teachers_prompt_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"Line 1 of .*rows\.jsonl is not a JSON object with question and hint"):
        groups(tmp_path, teacher_prompt="{question} Hint: {hint}")
    (literal,) = groups(tmp_path, teacher_prompt="Write {label} at the end.")
    assert "system\nWrite {label} at the end." in prompts(literal)[1]
