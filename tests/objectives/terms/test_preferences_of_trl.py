"""Preference terms against the trainers of TRL: values, gradients and metrics from the same log-probabilities."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ragged_batches import make_batch, with_policies
from test_evaluate import bind, evaluate
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from trl import DPOTrainer, KTOTrainer, RewardTrainer
from trl.experimental.cpo import CPOTrainer
from trl.experimental.orpo import ORPOTrainer

from objectives import Batch, Outputs

LENGTHS = [6, 3, 5, 2, 4, 7]
DESIRABLE = [1, 0, 0, 1, 1, 0]  # pair 0 is chosen first, pair 1 rejected first
ORDER = [0, 3, 4, 1, 2, 5]  # chosen completions of the three pairs, then their rejected ones
BETA = 0.3
REWARDS = {"margin": "rewards/margins", "chosen_reward": "rewards/chosen", "rejected_reward": "rewards/rejected"}


def case(seed: int) -> tuple[Batch, Outputs]:
    """Three pairs of ragged completions; the first token of each datum belongs to the prompt."""
    masks = [index > 0 for length in LENGTHS for index in range(length)]
    batch, outputs = with_policies(*make_batch(LENGTHS, seed=seed, masks=masks), seed=seed + 1)
    return replace(batch, labels_D={"pair": torch.tensor([0, 0, 1, 1, 2, 2]), "desirable": torch.tensor(DESIRABLE)}), (
        outputs
    )


def padded(values_DT: Tensor, batch: Batch, order: list[int] = ORDER) -> Tensor:
    """Rows of log-probabilities, one per datum in the order of TRL; 0 for tokens that are not trained."""
    rows = torch.where(batch.mask_DT, values_DT, 0.0).tensor_split(batch.offsets_D[1:-1])
    return pad_sequence([rows[datum] for datum in order], batch_first=True)


def model(log_probs: Tensor) -> Callable[..., SimpleNamespace]:
    """Model whose forward pass has these log-probabilities; TRL derives nothing but metrics from the other outputs."""
    zeros = torch.zeros_like(log_probs)
    outputs = SimpleNamespace(log_probs=log_probs, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool())
    return lambda **_: outputs


def trainer(**attributes: Any) -> SimpleNamespace:
    accelerator = SimpleNamespace(
        device=torch.device("cpu"), gather=lambda tensor: tensor, gather_for_metrics=lambda tensor: tensor
    )
    return SimpleNamespace(
        accelerator=accelerator,
        model=SimpleNamespace(training=True),
        beta=BETA,
        aux_loss_enabled=False,
        precompute_ref_logps=True,
        _metrics=defaultdict(lambda: defaultdict(list)),
        _total_train_tokens=0,
        _tp_size=1,
        **attributes,
    )


def inputs(batch: Batch, order: list[int] = ORDER) -> dict[str, Tensor]:
    """Inputs of TRL's forward pass, where the token before the first one is not predicted."""
    trained = padded(batch.mask_DT.long(), batch, order)
    mask = torch.nn.functional.pad(trained, (1, 0))
    return {"completion_mask": mask, "input_ids": torch.zeros_like(mask), "attention_mask": torch.ones_like(mask)}


def check(
    name: str, params: dict[str, float], loss: Tensor, logprobs_DT: Tensor, batch: Batch, outputs: Outputs
) -> Mapping[str, float]:
    """Compare a term with a loss of TRL that autograd differentiates by the packed log-probabilities."""
    actual = evaluate(bind(name, params=params), outputs, batch)
    (gradient_DT,) = torch.autograd.grad(loss, logprobs_DT)
    assert actual.value == pytest.approx(loss.item(), rel=1e-6)
    torch.testing.assert_close(actual.gradient_DT.double(), gradient_DT, rtol=1e-5, atol=1e-7)
    return actual.metrics


def check_metrics(metrics: Mapping[str, float], reference: SimpleNamespace, names: Mapping[str, str]) -> None:
    """Compare metrics of a term with those that a trainer of TRL has logged, by their names there."""
    logged = reference._metrics["train"]
    expected = {name: logged[of_trl][-1] for name, of_trl in (REWARDS | names).items()}
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("name", "loss_type"), [("dpo", "sigmoid"), ("ipo", "ipo")])
def test_dpo_and_ipo(name: str, loss_type: str, seed: int) -> None:
    """TRL's `ipo` divides the log-probabilities of a completion by its length; it equals ours if that length is 1."""
    batch, outputs = case(seed)
    reference_DT = outputs.ref_logprobs_DT
    assert reference_DT is not None
    logprobs_DT = outputs.logprobs_DT.clone().requires_grad_()
    policy, frozen = padded(logprobs_DT, batch), padded(reference_DT, batch)
    given = inputs(batch)
    if name == "ipo":
        policy, frozen = policy.sum(1, keepdim=True), frozen.sum(1, keepdim=True)
        given = {key: values[:, :2] for key, values in given.items()} | {"completion_mask": torch.tensor([[0, 1]] * 6)}
    chosen, rejected = frozen.sum(1).chunk(2)
    reference = trainer(
        ld_alpha=None,
        f_divergence_type="reverse_kl",
        loss_types=[loss_type],
        loss_weights=[1.0],
        use_weighting=False,
    )
    loss = DPOTrainer._compute_loss(
        reference, model(policy), given | {"ref_chosen_logps": chosen, "ref_rejected_logps": rejected}, False
    )
    metrics = check(name, {"beta": BETA}, loss, logprobs_DT, batch, outputs)
    check_metrics(metrics, reference, {"accuracy": "rewards/accuracies"})


@pytest.mark.parametrize("seed", range(5))
def test_kto(seed: int) -> None:
    """The last two datums are mismatched completions, which measure the divergence."""
    batch, outputs = case(seed)
    batch = replace(batch, labels_D={"desirable": torch.tensor([*DESIRABLE[:4], -1, -1])})
    reference_DT = outputs.ref_logprobs_DT
    assert reference_DT is not None
    logprobs_DT = outputs.logprobs_DT.clone().requires_grad_()
    labelled, mismatched = [0, 1, 2, 3], [4, 5]
    reference = trainer(
        loss_type="kto",
        calculate_KL=True,
        desirable_weight=0.7,
        undesirable_weight=1.6,
        _compute_kl_logps=lambda *_: padded(logprobs_DT, batch, mismatched).sum(1),
    )
    loss = KTOTrainer._compute_loss(
        reference,
        model(padded(logprobs_DT, batch, labelled)),
        inputs(batch, labelled)
        | {
            "label": torch.tensor(DESIRABLE[:4]).bool(),
            "ref_logps": padded(reference_DT, batch, labelled).sum(1),
            "ref_KL_logps": padded(reference_DT, batch, mismatched).sum(1),
        },
        False,
    )
    params = {"beta": BETA, "desirable_weight": 0.7, "undesirable_weight": 1.6}
    metrics = check("kto", params, loss, logprobs_DT, batch, outputs)
    check_metrics(metrics, reference, {"z": "kl"})


@pytest.mark.parametrize("seed", range(5))
def test_simpo(seed: int) -> None:
    batch, outputs = case(seed)
    logprobs_DT = outputs.logprobs_DT.clone().requires_grad_()
    means = padded(logprobs_DT, batch).sum(1) / padded(batch.mask_DT.double(), batch).sum(1)
    reference = trainer(alpha=0.0, loss_type="simpo", simpo_gamma=0.7, label_smoothing=0.0)
    losses, _, _ = CPOTrainer.cpo_loss(reference, *means.chunk(2))
    check("simpo", {"beta": BETA, "gamma": 0.7}, losses.mean(), logprobs_DT, batch, outputs)


@pytest.mark.parametrize("seed", range(5))
def test_orpo(seed: int) -> None:
    """TRL averages the likelihood over the tokens of prompts and completions, so only the odds ratio is TRL's here."""
    batch, outputs = case(seed)
    logprobs_DT = outputs.logprobs_DT.clone().requires_grad_()
    means = padded(logprobs_DT, batch).sum(1) / padded(batch.mask_DT.double(), batch).sum(1)
    ratios, *_ = ORPOTrainer.odds_ratio_loss(trainer(), *means.chunk(2))
    loss = -means.chunk(2)[0].mean() - ratios.mean()
    check("orpo", {"odds_weight": BETA}, loss, logprobs_DT, batch, outputs)


@pytest.mark.parametrize("seed", range(5))
def test_bradley_terry(seed: int) -> None:
    batch, outputs = case(seed)
    logprobs_DT = outputs.logprobs_DT.clone().requires_grad_()
    logits = padded(logprobs_DT, batch).sum(1, keepdim=True)
    reference = trainer(args=SimpleNamespace(center_rewards_coefficient=None))
    loss = RewardTrainer.compute_loss(reference, lambda **_: SimpleNamespace(logits=logits), inputs(batch))
    metrics = check("bradley_terry", {}, loss, logprobs_DT, batch, outputs)
    for name in ("accuracy", "margin"):
        assert metrics[name] == pytest.approx(reference._metrics["train"][name][-1], rel=1e-6)
