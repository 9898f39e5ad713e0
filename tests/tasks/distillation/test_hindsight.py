"""SDPO: the teacher's context, and the gradient of its advantages compared with the divergence by enumeration."""

from __future__ import annotations

from typing import Any

import pytest
import tinker
import torch
from engine_process import API_KEY
from tinker import types
from tinker_cookbook.completers import TokensWithLogprobs
from tinker_cookbook.renderers import get_renderer
from tinker_cookbook.rl.types import Trajectory, TrajectoryGroup, Transition
from torch import Tensor

from blocks.errors import ConfigError
from tasks.common.event_loop import open_workers
from tasks.distillation.hindsight import Hindsight
from tasks.rl.rollouts.group_rollout import Group
from tasks.training.teacher import Teacher, TeacherRequest, hard_datum, score

VOCABULARY = 264  # of the tiny model
END = 258


@pytest.fixture(scope="module")
def tokenizer(engine_url: str) -> Any:
    session = tinker.ServiceClient(base_url=engine_url, api_key=API_KEY)
    return session.create_lora_training_client("tiny", rank=4).result().get_tokenizer()


def hindsight(tokenizer: Any, renderer: str = "role_colon", **changes: Any) -> Hindsight:
    fields = {"success_reward": 1.0, "solution": " S:{solution}", "feedback": " F:{feedback}", "closing": " Again.\n\n"}
    return Hindsight(**fields | changes, renderer=get_renderer(renderer, tokenizer))


def group(tokenizer: Any, answers: dict[str, float], feedback: dict[int, str] | None = None) -> Group:
    """Return a group of one completion per answer with its reward."""
    ob = types.ModelInput.from_ints(tokenizer.encode("User: Add 1 and 2.\n\nAssistant:", add_special_tokens=False))
    trajectories = [
        Trajectory(
            [Transition(ob, TokensWithLogprobs([*answer.encode(), END], [-1.0] * (len(answer) + 1)), reward, True)],
            types.ModelInput.empty(),
        )
        for answer, reward in answers.items()
    ]
    labels = tuple({"feedback": text} if (text := (feedback or {}).get(n)) else {} for n in range(len(answers)))
    size = len(answers)
    return Group((), TrajectoryGroup(trajectories, [0.0] * size, [{}] * size), (), labels)


def test_contexts_have_a_success_of_another_rollout_and_the_feedback(tokenizer: Any) -> None:
    answers = {" 4": 0.0, " 3": 1.0, " three": 1.0, " five": 0.5}
    contexts = hindsight(tokenizer).contexts(group(tokenizer, answers, {0: "too large", 2: ""}))
    assert contexts == [
        " S:3 F:too large Again.\n\n",
        " S:three Again.\n\n",  # never the rollout itself
        " S:3 Again.\n\n",
        " S:3 Again.\n\n",
    ]
    assert hindsight(tokenizer).contexts(group(tokenizer, {" 4": 0.0, " 3": 1.0})) == [" S:3 Again.\n\n", ""]
    assert hindsight(tokenizer).contexts(group(tokenizer, {" 4": 0.0}, {0: "no"})) == [" F:no Again.\n\n"]
    assert hindsight(tokenizer, success_reward=2.0).contexts(group(tokenizer, answers)) == [""] * 4


def test_context_ends_the_users_message(tokenizer: Any) -> None:
    prompt = list(b"User: Add 1 and 2.\n\nAssistant:")
    own = hard_datum([*prompt, *b" 4", END], [0.0] * len(prompt) + [1.0] * 3)
    datum = hindsight(tokenizer).datum(own, " S:3", tokenizer)
    assert tokenizer.decode(datum.model_input.to_ints()) == "User: Add 1 and 2. S:3\n\nAssistant: 4"
    weights = datum.loss_fn_inputs["weights"].to_torch()
    targets = datum.loss_fn_inputs["target_tokens"].to_torch()
    assert targets[weights > 0].tolist() == [*b" 4", END]

    # Two turns: the context stands before the first, and both stay targets.
    later = list(b"\n\nUser: Sure?\n\nAssistant:")
    turns = hard_datum(
        [*prompt, *b" 4", *later, *b" 3"], [0.0] * len(prompt) + [1.0] * 2 + [0.0] * len(later) + [1.0] * 2
    )
    datum = hindsight(tokenizer).datum(turns, "!", tokenizer)
    assert datum.loss_fn_inputs["weights"].to_torch().nonzero().numel() == 4
    targets = datum.loss_fn_inputs["target_tokens"].to_torch()
    assert targets[datum.loss_fn_inputs["weights"].to_torch() > 0].tolist() == [*b" 4 3"]

    with pytest.raises(ConfigError, match=r"set hindsight\.renderer_name"):
        hindsight(tokenizer, "qwen3").datum(own, "!", tokenizer)


@pytest.mark.parametrize("name", ["role_colon", "qwen3_instruct", "llama3"])
def test_context_equals_a_longer_message(tokenizer: Any, name: str) -> None:
    """The renderer gives the same tokens for a message that ends with the context."""
    renderer = get_renderer(name, tokenizer)
    prompt, expected = (
        renderer.build_generation_prompt([{"role": "user", "content": text}]).to_ints()
        for text in ("Add 1 and 2.", "Add 1 and 2. S:3")
    )
    own = hard_datum([*prompt, 65], [0.0] * len(prompt) + [1.0])
    assert hindsight(tokenizer, name).datum(own, " S:3", tokenizer).model_input.to_ints() == expected


def test_gradient_is_that_of_the_divergence(engine_url: str, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equation 1 of the paper: the KL from the student to the teacher with context, over all tokens of the vocabulary.

    Each token of the vocabulary is a completion; the expectation of the policy gradient with the run's advantages is
    compared with autograd of the divergence, and of TRL's loss.
    """
    session = tinker.ServiceClient(base_url=engine_url, api_key=API_KEY)
    policy = session.create_lora_training_client("tiny", rank=4, seed=0).result()
    lesson = hard_datum(list(b"User: Add 1 and 2. S:3\n\nAssistant: 3"), [0.0] * 34 + [1.0] * 2)
    for _ in range(4):
        policy.forward_backward([lesson], "cross_entropy")
        policy.optim_step(types.AdamParams(learning_rate=3e-2)).result()
    sampler = policy.save_weights_and_get_sampling_client().result()
    prompt = list(b"User: Add 1 and 2.\n\nAssistant:")
    students = [hard_datum([*prompt, token], [0.0] * len(prompt) + [1.0]) for token in range(VOCABULARY)]
    taught = [hindsight(tokenizer).datum(datum, " S:3 Again.\n\n", tokenizer) for datum in students]
    teacher = Teacher(sampler, "the policy")
    with open_workers():
        student_V, teacher_V = (
            torch.cat(score.fn([TeacherRequest(teacher, datum) for datum in datums])) for datums in (students, taught)
        )
    assert student_V.exp().sum().item() == pytest.approx(1, abs=1e-3)
    advantages_V = teacher_V - student_V
    assert advantages_V.abs().max() > 0.05

    logits_V = student_V.clone().requires_grad_()
    policy_loss = -(student_V.exp() * advantages_V * logits_V.log_softmax(-1)).sum()
    (gradient_V,) = torch.autograd.grad(policy_loss, logits_V)

    (exact_V,) = torch.autograd.grad(divergence(logits_V, teacher_V), logits_V)
    torch.testing.assert_close(gradient_V, exact_V, atol=1e-6, rtol=1e-3)
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    from trl.experimental.sdpo.loss_utils import compute_full_logit_self_distillation_loss

    trl = compute_full_logit_self_distillation_loss(logits_V[None], teacher_V[None], distillation_alpha=1.0).sum()
    (trl_V,) = torch.autograd.grad(trl, logits_V)
    torch.testing.assert_close(gradient_V, trl_V, atol=1e-6, rtol=1e-3)
    assert exact_V.abs().max() > 1e-3


def divergence(logits_V: Tensor, teacher_V: Tensor) -> Tensor:
    """``sum p log(p / q)`` for the softmax ``p`` of the student's logits and the teacher's ``q``."""
    p_V = logits_V.softmax(-1)
    return (p_V * (p_V.log() - teacher_V.log_softmax(-1))).sum()
