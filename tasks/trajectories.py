"""From the trajectories of a step's groups to its batch, and to the figures that they are watched by."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import tinker
import torch
from tinker import types
from tinker_cookbook.rl.data_processing import assemble_training_data
from tinker_cookbook.rl.metric_util import compute_trajectory_metrics
from tinker_cookbook.tokenizer_utils import Tokenizer
from torch import Tensor

from blocks.errors import ConfigError
from objectives.batch import Batch, pack
from tasks.advantages import Shape, compute_token_advantages
from tasks.data import Datums
from tasks.rollout import Group
from tasks.source import Sampled, Trained

# Labels of a datum: which of the groups that were played it is of, those left out counted, and which of its members.
PLAYED, MEMBER = "played", "member"


def pack_groups(groups: Sequence[Group], shape: Shape, tokenizer: Tokenizer) -> Batch:
    """The batch of a step: each trajectory's sampled tokens, with their advantages.

    Where all rewards are the same nothing is to be learned; one group is kept, with advantages of 0.

    Raises:
        ConfigError: no group succeeded.
    """
    numbers = [number for number, each in enumerate(groups) if each.trajectories is not None]
    if not numbers:
        error = next((error for each in groups for error in each.errors), None)
        said = f"{error.error_type}: {error.error_message}" if error else "without an error"
        raise ConfigError(
            f"None of the {len(groups)} groups of a step could be played ({' '.join(said.split())[:300]}): look at the "
            "environment, or raise rollout.max_retries or rollout.timeout_s."
        )
    if shape.drop_constant:
        numbers = [number for number in numbers if not _is_constant(groups[number])] or numbers[:1]
    played = [each for number in numbers if (each := groups[number].trajectories) is not None]
    unused = [torch.zeros(len(each.trajectories_G)) for each in played]
    data, places = assemble_training_data(played, unused)
    targets_D = [_field(datum, "target_tokens").to(torch.int64) for datum in data]
    masks_D = [_field(datum, "mask").float() for datum in data]
    target_tokens_DT, offsets_D = pack(targets_D)
    mask_DT = pack(masks_D)[0]
    # The sampled tokens of a batch are those of its trajectories, in the same order.
    tokens = compute_token_advantages(played, shape)
    return Batch(
        target_tokens_DT,
        mask_DT,
        offsets_D,
        tuple(
            str(tokenizer.decode(targets[mask != 0].tolist())) for targets, mask in zip(targets_D, masks_D, strict=True)
        ),
        datums=Datums([_supervised(datum, mask) for datum, mask in zip(data, masks_D, strict=True)]),
        advantages_DT=_at(mask_DT, tokens.advantages_T),
        values_DT=_at(mask_DT, tokens.values_T),
        returns_DT=_at(mask_DT, tokens.returns_T),
        sampling_logprobs_DT=pack([_field(datum, "logprobs").float() for datum in data])[0],
        labels_D={
            "group": torch.tensor([each["group_idx"] for each in places]),
            PLAYED: torch.tensor([numbers[each["group_idx"]] for each in places]),
            MEMBER: torch.tensor([each["traj_idx"] for each in places]),
        },
    )


def count_tokens(groups: Sequence[Group]) -> Sampled:
    """The tokens of the prompts that the turns of the groups were sampled from, and those that were sampled."""
    turns = [
        turn
        for group in groups
        if group.trajectories is not None
        for trajectory in group.trajectories.trajectories_G
        for turn in trajectory.transitions
    ]
    return Sampled(sum(turn.ob.length for turn in turns), sum(len(turn.ac.tokens) for turn in turns))


def compute_group_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Figures of all groups that were played, whether they are trained on or not, under tinker-cookbook's names."""
    played = [each for each in groups if each.trajectories is not None]
    trajectories = [each.trajectories for each in played if each.trajectories is not None]
    metrics = compute_trajectory_metrics(trajectories, [list(each.tags) for each in played]) if played else {}
    errors = Counter(error.error_type for each in groups for error in each.errors)
    return metrics | {
        "rollout_errors/total": float(errors.total()),
        "rollout_errors/groups_skipped": float(len(groups) - len(played)),
        **{f"rollout_errors/{name}": float(count) for name, count in errors.items()},
    }


def penalize_distance(batch: Batch, reference_DT: Tensor, coefficient: float) -> tuple[Batch, float]:
    """Take the distance from a reference out of the reward, and that distance, in nats per sampled token.

    Of each token's advantage, ``coefficient`` times what its ``log p - log p_ref`` is above the batch's mean; as
    tinker-cookbook's `incorporate_kl_penalty`.
    """
    assert batch.sampling_logprobs_DT is not None
    assert batch.advantages_DT is not None
    distance_DT = torch.where(batch.mask_DT, batch.sampling_logprobs_DT - reference_DT, 0.0)
    mean = distance_DT.sum() / batch.mask_DT.sum()
    penalty_DT = torch.where(batch.mask_DT, coefficient * (mean - distance_DT), 0.0)
    return replace(batch, advantages_DT=batch.advantages_DT + penalty_DT), mean.item()


def compute_critic_metrics(trained: Sequence[Trained]) -> dict[str, float]:
    """How good the expectation was that advantages are measured from, over the sampled tokens.

    `value_loss` is half the mean squared error of the expectation, and `explained_variance` the share of the returns'
    variance that it explains: 1 where it is right, 0 where a constant would do as well, and left out where all returns
    are the same.
    """
    returns = _sampled_tokens([each.batch.returns_DT for each in trained], trained)
    error = returns - _sampled_tokens([each.batch.values_DT for each in trained], trained)
    metrics = {"value_loss": error.square().mean().item() / 2}
    variance = returns.var(correction=0).item()
    if variance > 0:
        metrics["explained_variance"] = 1 - error.var(correction=0).item() / variance
    return metrics


def compute_policy_metrics(trained: Sequence[Trained]) -> dict[str, float]:
    """How far the policy is from the one that sampled, and how sure that one was, under tinker-cookbook's names.

    `optim/kl_sample_train_v1` and `_v2` are the means over the sampled tokens of ``d`` and ``d ** 2 / 2``, where ``d``
    is the sampler's logprob minus the policy's, in nats; `optim/entropy` the sampler's, by its own samples.
    """
    sampled = _sampled_tokens([each.batch.sampling_logprobs_DT for each in trained], trained)
    advantages = _sampled_tokens([each.batch.advantages_DT for each in trained], trained)
    distance = sampled - _sampled_tokens([each.logprobs_DT for each in trained], trained)
    return {
        "optim/kl_sample_train_v1": distance.mean().item(),
        "optim/kl_sample_train_v2": distance.square().mean().item() / 2,
        "optim/entropy": -sampled.mean().item(),
        "advantage/mean": advantages.mean().item(),
        "advantage/std": advantages.std(correction=0).item(),
    }


def _sampled_tokens(fields: Sequence[Tensor | None], trained: Sequence[Trained]) -> Tensor:
    return torch.cat(
        [field_DT[each.batch.mask_DT] for field_DT, each in zip(fields, trained, strict=True) if field_DT is not None]
    )


def _is_constant(group: Group) -> bool:
    assert group.trajectories is not None
    return len(set(group.trajectories.get_total_rewards())) == 1


def _at(mask_DT: Tensor, values_T: Tensor) -> Tensor:
    """The values of the sampled tokens at their places in the batch, 0 elsewhere."""
    return torch.zeros_like(mask_DT).masked_scatter(mask_DT != 0, values_T.to(mask_DT.dtype))


def _field(datum: tinker.Datum, name: str) -> Tensor:
    return datum.loss_fn_inputs[name].to_torch()


def _supervised(datum: tinker.Datum, mask: Tensor) -> tinker.Datum:
    """What a forward pass reads of a datum."""
    targets = datum.loss_fn_inputs["target_tokens"]
    inputs = {"target_tokens": targets, "weights": types.TensorData.from_torch(mask)}
    return tinker.Datum(model_input=datum.model_input, loss_fn_inputs=inputs)
