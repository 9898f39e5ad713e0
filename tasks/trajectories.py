"""From the trajectories of a step's groups to its batch, and to the figures that they are watched by."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import tinker
import torch
from tinker import types
from tinker_cookbook.rl.data_processing import assemble_training_data
from tinker_cookbook.rl.metric_util import compute_trajectory_metrics
from tinker_cookbook.rl.types import TrajectoryGroup
from tinker_cookbook.tokenizer_utils import Tokenizer
from torch import Tensor

from blocks.errors import ConfigError
from objectives.advantages import centre_by_group, leave_one_out
from objectives.batch import Batch, pack
from tasks.data import Datums
from tasks.rollout import Group


@dataclass(frozen=True, slots=True)
class Shape:
    """How rewards become what is trained on.

    Attributes:
        baseline: `group_mean` or `leave_one_out`.
        scale: whether advantages are divided by the group's standard deviation.
        drop_constant: whether groups whose members all earned the same are left out.
    """

    baseline: str
    scale: bool
    drop_constant: bool


def pack_groups(groups: Sequence[Group], shape: Shape, tokenizer: Tokenizer) -> Batch:
    """The batch of a step: each trajectory's sampled tokens, with their advantages.

    Where all rewards are the same nothing is to be learned; one group is kept, with advantages of 0.

    Raises:
        ConfigError: no group succeeded.
    """
    played = [each.trajectories for each in groups if each.trajectories is not None]
    if not played:
        error = next((error for each in groups for error in each.errors), None)
        said = f"{error.error_type}: {error.error_message}" if error else "without an error"
        raise ConfigError(
            f"None of the {len(groups)} groups of a step could be played ({' '.join(said.split())[:300]}): look at the "
            "environment, or raise rollout.max_retries or rollout.timeout_s."
        )
    if shape.drop_constant:
        played = [each for each in played if not _is_constant(each)] or played[:1]
    data, places = assemble_training_data(played, [_advantages(each, shape) for each in played])
    targets_D = [_field(datum, "target_tokens").to(torch.int64) for datum in data]
    masks_D = [_field(datum, "mask").float() for datum in data]
    target_tokens_DT, offsets_D = pack(targets_D)
    return Batch(
        target_tokens_DT,
        pack(masks_D)[0],
        offsets_D,
        tuple(
            str(tokenizer.decode(targets[mask != 0].tolist())) for targets, mask in zip(targets_D, masks_D, strict=True)
        ),
        datums=Datums([_supervised(datum, mask) for datum, mask in zip(data, masks_D, strict=True)]),
        advantages_DT=pack([_field(datum, "advantages").float() for datum in data])[0],
        sampling_logprobs_DT=pack([_field(datum, "logprobs").float() for datum in data])[0],
        labels_D={"group": torch.tensor([each["group_idx"] for each in places])},
    )


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


def compute_policy_metrics(batch: Batch, logprobs_DT: Tensor) -> dict[str, float]:
    """How far the policy is from the one that sampled, and how sure that one was, under tinker-cookbook's names.

    `optim/kl_sample_train_v1` and `_v2` are the means over the sampled tokens of ``d`` and ``d ** 2 / 2``, where ``d``
    is the sampler's logprob minus the policy's, in nats; `optim/entropy` the sampler's, by its own samples.
    """
    assert batch.sampling_logprobs_DT is not None
    assert batch.advantages_DT is not None
    sampled = batch.sampling_logprobs_DT[batch.mask_DT]
    distance = sampled - logprobs_DT[batch.mask_DT]
    advantages = batch.advantages_DT[batch.mask_DT]
    return {
        "optim/kl_sample_train_v1": distance.mean().item(),
        "optim/kl_sample_train_v2": distance.square().mean().item() / 2,
        "optim/entropy": -sampled.mean().item(),
        "advantage/mean": advantages.mean().item(),
        "advantage/std": advantages.std(correction=0).item(),
    }


def _is_constant(group: TrajectoryGroup) -> bool:
    return len(set(group.get_total_rewards())) == 1


def _advantages(group: TrajectoryGroup, shape: Shape) -> Tensor:
    rewards_G = torch.tensor(group.get_total_rewards(), dtype=torch.float32)
    one_group = torch.zeros(len(rewards_G), dtype=torch.int64)
    if shape.baseline == "leave_one_out":
        return leave_one_out(rewards_G, one_group)
    return centre_by_group(rewards_G, one_group, scale=shape.scale)


def _field(datum: tinker.Datum, name: str) -> Tensor:
    return datum.loss_fn_inputs[name].to_torch()


def _supervised(datum: tinker.Datum, mask: Tensor) -> tinker.Datum:
    """What a forward pass reads of a datum."""
    targets = datum.loss_fn_inputs["target_tokens"]
    inputs = {"target_tokens": targets, "weights": types.TensorData.from_torch(mask)}
    return tinker.Datum(model_input=datum.model_input, loss_fn_inputs=inputs)
