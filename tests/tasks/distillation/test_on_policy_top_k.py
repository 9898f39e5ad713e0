"""Soft targets on the student's samples: tinker-cookbook's SDFT data, and the divergence over the whole vocabulary."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
import tinker
import torch
from engine_process import API_KEY
from random_groups import RandomScores, cookbook_data, packed, random_groups
from tinker import types
from tinker_cookbook.distillation.sdft import build_topk_distillation_datums, reverse_kl_custom_loss

from blocks.errors import ConfigError
from objectives.batch import Outputs
from objectives.terms.token.divergence import teacher_reverse_kl_topk as term
from tasks.common.event_loop import open_workers
from tasks.distillation.soft_targets import with_top_k
from tasks.training.teacher import Teacher, TeacherRequest, compute_top_k, hard_datum, replace_prompt

VOCABULARY = 264  # of the tiny model


class RandomTeacher(RandomScores):
    """Sampling client with random top-K logprobs of each position, a function of the sequence."""

    def response(self, prompt: types.ModelInput, top_k: int) -> SimpleNamespace:
        generator = torch.Generator().manual_seed(hash(tuple(prompt.to_ints())) % 2**32)
        logprobs = torch.randn(prompt.length, 50, generator=generator).log_softmax(-1).sort(-1, descending=True)
        rows = [
            [(3 + int(token), float(value)) for token, value in zip(indices[:top_k], values[:top_k], strict=True)]
            for values, indices in zip(logprobs.values, logprobs.indices, strict=True)
        ]
        return SimpleNamespace(topk_prompt_logprobs=[None, *rows[1:]], prompt_logprobs=self.logprobs(prompt))

    async def sample_async(self, prompt: types.ModelInput, topk_prompt_logprobs: int, **_: Any) -> SimpleNamespace:
        return self.response(prompt, topk_prompt_logprobs)

    async def sample(self, prompt: types.ModelInput, *_: Any, topk_prompt_logprobs: int, **__: Any) -> SimpleNamespace:
        return self.response(prompt, topk_prompt_logprobs)


@pytest.mark.parametrize("skip", [0, 2, 3])
def test_data_equals_the_cookbooks(skip: int) -> None:
    """Each group of one turn has a prompt of its own for the teacher."""
    groups = random_groups(seed=3, num_turns=1)
    prompts = [types.ModelInput.from_ints([9, 8, 7, number]) for number in range(len(groups))]
    data = cookbook_data(groups)
    rows = [{"group_idx": number, "traj_idx": member} for number in range(len(groups)) for member in range(2)]
    client = cast(Any, RandomTeacher())
    expected, _ = asyncio.run(
        build_topk_distillation_datums(data, rows, client, prompts, topk=5, skip_first_n_tokens=skip)
    )
    batch = packed(groups)
    requests = [
        TeacherRequest(Teacher(client, "random"), replace_prompt(prompts[row["group_idx"]], datum))
        for row, datum in zip(rows, batch.datums, strict=True)
    ]
    with open_workers():
        tops = compute_top_k.fn(requests, 5)
    soft = with_top_k(batch, tops, skip).batch
    num_trained = 0
    for ours, theirs in zip(soft.datums, expected, strict=True):
        assert ours.model_input == theirs.model_input
        weights, their_weights = (datum.loss_fn_inputs["weights"].to_torch() for datum in (ours, theirs))
        torch.testing.assert_close(weights, their_weights)
        targets, their_targets = (datum.loss_fn_inputs["target_tokens"].to_torch() for datum in (ours, theirs))
        assert torch.equal(targets[weights > 0], their_targets[weights > 0])
        num_trained += int((weights > 0).any(-1).sum())
    assert num_trained == int(soft.mask_DT.sum()) == sum(max(0, len(top.tokens_MK) - skip) for top in tops)
    # The teacher's logprobs of the sampled tokens come with the same response.
    scores = [RandomScores().logprobs(requests[0].datum.model_input.append_int(7))]
    assert len(scores[0]) == requests[0].datum.model_input.length + 1
    assert all(top.target_logprobs_M is not None and top.target_logprobs_M.isfinite().all() for top in tops)


def test_reverse_kl_equals_the_cookbooks() -> None:
    """Value and gradient on the same data, with positions that have no targets."""
    batch = packed(random_groups(seed=3, num_turns=1))
    client = cast(Any, RandomTeacher())
    with open_workers():
        tops = compute_top_k.fn([TeacherRequest(Teacher(client, "random"), datum) for datum in batch.datums], 5)
    soft = with_top_k(batch, tops, 2).batch
    generator = torch.Generator().manual_seed(0)
    logprobs = (-3 * torch.rand(soft.target_tokens_DT.shape, generator=generator)).requires_grad_()
    ours = term.evaluate(Outputs(logprobs), soft)[soft.mask_DT].sum()
    lengths = soft.offsets_D.diff().tolist()
    theirs, metrics = reverse_kl_custom_loss(list(soft.datums), list(logprobs.split(lengths)))
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-5)
    assert metrics["sdft/reverse_kl_positions"] == int(soft.mask_DT.sum())
    (gradient,) = torch.autograd.grad(ours, logprobs)
    (expected,) = torch.autograd.grad(theirs, logprobs)
    torch.testing.assert_close(gradient, expected, atol=1e-6, rtol=1e-4)
    assert gradient.abs().max() > 1e-2


def test_skipping_all_tokens_is_refused() -> None:
    batch = packed(random_groups(seed=3, num_turns=1))
    client = cast(Any, RandomTeacher())
    with open_workers():
        tops = compute_top_k.fn([TeacherRequest(Teacher(client, "random"), datum) for datum in batch.datums], 5)
    with pytest.raises(ConfigError, match="more than skip_first_n_tokens=6 tokens: reduce"):
        with_top_k(batch, tops, 6)


def full_logprobs(client: tinker.TrainingClient, datum: tinker.Datum) -> torch.Tensor:
    """Logprobs of the whole vocabulary at each position of a datum, by a forward pass with all tokens as targets."""
    num_positions = datum.model_input.length
    targets = torch.arange(VOCABULARY).repeat(num_positions, 1)
    inputs = {"target_tokens": targets, "weights": torch.ones(targets.shape)}
    tensors = {key: types.TensorData.from_torch(value) for key, value in inputs.items()}
    full = tinker.Datum(model_input=datum.model_input, loss_fn_inputs=tensors)
    return client.forward([full], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_torch()


def test_loss_approaches_the_divergence_over_the_vocabulary(engine_url: str) -> None:
    """Teacher and student are adapters of the tiny model; the cross-entropy minus the teacher's entropy is the KL."""
    session = tinker.ServiceClient(base_url=engine_url, api_key=API_KEY)
    student = session.create_lora_training_client("tiny", rank=4, seed=0).result()
    teacher = session.create_lora_training_client("tiny", rank=4, seed=1).result()
    groups = random_groups(seed=4, num_turns=1)
    batch = packed(groups)
    lesson = [hard_datum([65, 66, *([97, 98] * 6)], [0.0, *([1.0] * 13)])]
    for _ in range(8):
        teacher.forward_backward(lesson, "cross_entropy")
        teacher.optim_step(types.AdamParams(learning_rate=5e-2)).result()
    sampler = teacher.save_weights_and_get_sampling_client().result()
    requests = [TeacherRequest(Teacher(sampler, "trained"), datum) for datum in batch.datums]
    trained = [datum.loss_fn_inputs["weights"].to_torch().nonzero()[:, 0] for datum in batch.datums]
    p = torch.cat([full_logprobs(teacher, d)[t] for d, t in zip(batch.datums, trained, strict=True)]).exp()
    q = torch.cat([full_logprobs(student, d)[t] for d, t in zip(batch.datums, trained, strict=True)])
    assert torch.allclose(p.sum(-1), torch.ones(len(p)), atol=1e-4)
    exact = float((p * (p.log() - q)).sum(-1).mean())
    errors = []
    for top_k in (16, 64, VOCABULARY):
        with open_workers():
            tops = compute_top_k.fn(requests, top_k)
        soft = with_top_k(batch, tops, 0)
        outputs = student.forward(list(soft.batch.datums), "cross_entropy").result().loss_fn_outputs
        logprobs = torch.cat([output["logprobs"].to_torch().reshape(-1, top_k) for output in outputs])
        weights = soft.batch.weights_DT
        cross_entropy = -(weights * logprobs).sum() / soft.batch.mask_DT.sum()
        entropy = -torch.special.xlogy(weights, weights).sum() / soft.batch.mask_DT.sum()
        errors.append(abs(float(cross_entropy - entropy) - exact))
        # Merging the other tokens never raises the divergence.
        assert soft.forward_kl(logprobs) <= exact + 1e-3
    assert exact > 0.5
    assert errors[2] < 1e-3 * exact
    assert errors[2] < errors[1] < errors[0]
    assert soft.forward_kl(logprobs) == pytest.approx(exact, rel=1e-3)
    for top, score in zip(tops, trained, strict=True):
        assert top.target_logprobs_M is not None
        assert len(top.target_logprobs_M) == len(score)
    targets = torch.cat(
        [d.loss_fn_inputs["target_tokens"].to_torch()[t] for d, t in zip(batch.datums, trained, strict=True)]
    )
    actual = torch.cat([top.target_logprobs_M for top in tops if top.target_logprobs_M is not None])
    torch.testing.assert_close(actual, p.log().gather(1, targets[:, None])[:, 0], atol=1e-3, rtol=1e-3)
