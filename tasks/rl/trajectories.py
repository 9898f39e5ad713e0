"""Packing of a step's trajectories into its batch, and metrics of rollouts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from statistics import fmean

import tinker
import torch
from tinker import types
from tinker_cookbook.rl.data_processing import assemble_training_data
from tinker_cookbook.rl.metric_util import compute_trajectory_metrics
from tinker_cookbook.rl.types import (
    PARSE_ERROR_MASKED_METRIC_KEY,
    Metrics,
    Trajectory,
    TrajectoryGroup,
    Transition,
)
from tinker_cookbook.tokenizer_utils import Tokenizer
from torch import Tensor

from blocks.errors import ConfigError
from objectives.advantages import discounted_returns
from objectives.batch import Batch, pack
from objectives.labels import MEMBER, PROMPT
from tasks.rl.advantages import AdvantageSettings, compute_token_advantages, has_no_advantages
from tasks.rl.named_rewards import RewardWeights, combine_advantages, is_constant
from tasks.rl.rollouts.group_rollout import Group
from tasks.rl.rollouts.hooks import action_shares
from tasks.rl.rollouts.sampling_distribution import Completion
from tasks.rl.rollouts.truncation import is_truncated
from tasks.training.batch_source import SampledTokens, TrainedBatch
from tasks.training.datums import Datums
from tasks.training.tracking.metric_names import safe_name

# Label of a datum: index of its group among all groups of the minibatch, dropped ones included.
GROUP_INDEX = "played"
_MAX_ERROR = 300  # characters of an error in a message


def pack_groups(
    groups: Sequence[Group],
    settings: AdvantageSettings,
    tokenizer: Tokenizer,
    mix: RewardWeights | None = None,
    *,
    mask_truncated: bool = False,
) -> Batch:
    """Pack the sampled tokens of all trajectories with their advantages.

    Trajectories that are masked have no datums, but their rewards count in the mean and the deviation of their group.
    Turns that the environment masks (`mask_error_turns` of tinker-cookbook) are not trained on either. If
    `drop_constant` would drop all groups, one group is kept, and if `mask_truncated` would mask all trajectories, one
    trajectory is kept, with advantages of 0.

    Args:
        mix: weights of named rewards; None for the total reward of the environments.
        mask_truncated: mask trajectories whose last completion reached the token limit.

    Raises:
        ConfigError: no group succeeded, or none has a token to train on.
    """
    numbers = groups_to_pack(groups, mix, settings)
    if not numbers:
        raise ConfigError(
            f"All {len(groups)} groups of a step or of one of its minibatches failed ({first_error(groups)}): check "
            "the environment, raise rollout.max_retries or rollout.timeout_s, or use fewer minibatches and substeps."
        )
    completed = [group for number in numbers if (group := groups[number].trajectories) is not None]
    # The assembled datums and the trajectories have the same sampled tokens in the same order.
    tokens = combine_advantages(completed, settings, mix) if mix else compute_token_advantages(completed, settings)
    trained = _trained_members(completed, mask_truncated)
    if not trained:
        trained = _trained_members(completed, mask_truncated=False)[:1]
        if not trained:
            raise ConfigError("No rollout of a step has a sampled token to train on: check the environment.")
        tokens = replace(tokens, advantages_T=torch.zeros_like(tokens.advantages_T))
    trained_T = _trained_tokens(completed, trained)
    untempered_T = _untempered_logprobs(completed)
    unused_advantages = [torch.zeros(len(group.trajectories_G)) for group in completed]
    assembled = zip(*assemble_training_data(completed, unused_advantages), strict=True)
    rows = [
        (datum, (row["group_idx"], row["traj_idx"]))
        for datum, row in assembled
        if (row["group_idx"], row["traj_idx"]) in trained and bool(_field(datum, "mask").any())
    ]
    targets_D = [_field(datum, "target_tokens").to(torch.int64) for datum, _ in rows]
    masks_D = [_field(datum, "mask").float() for datum, _ in rows]
    target_tokens_DT, offsets_D = pack(targets_D)
    mask_DT = pack(masks_D)[0]
    group_D, member_D = (torch.tensor([place[axis] for _, place in rows]) for axis in range(2))
    return Batch(
        target_tokens_DT,
        mask_DT,
        offsets_D,
        tuple(
            str(tokenizer.decode(targets[mask != 0].tolist())) for targets, mask in zip(targets_D, masks_D, strict=True)
        ),
        datums=Datums([_supervised(datum, mask) for (datum, _), mask in zip(rows, masks_D, strict=True)]),
        advantages_DT=_at(mask_DT, tokens.advantages_T[trained_T]),
        values_DT=_at(mask_DT, tokens.values_T[trained_T]),
        returns_DT=_at(mask_DT, tokens.returns_T[trained_T]),
        sampling_logprobs_DT=pack([_field(datum, "logprobs").float() for datum, _ in rows])[0],
        untempered_logprobs_DT=None if untempered_T is None else _at(mask_DT, untempered_T[trained_T]),
        labels_D={
            "group": group_D,
            PROMPT: group_D,
            GROUP_INDEX: torch.tensor(numbers)[group_D],
            MEMBER: member_D,
        },
        text_labels_D=_text_labels([(groups[numbers[group]], member) for _, (group, member) in rows]),
    )


def groups_to_pack(groups: Sequence[Group], mix: RewardWeights | None, settings: AdvantageSettings) -> list[int]:
    """Indices of the groups that succeeded and, with `drop_constant`, are not constant.

    If all of them are constant, the first one with a token to train on is packed.
    """
    completed = [number for number, group in enumerate(groups) if group.trajectories is not None]
    if not settings.drop_constant:
        return completed
    varied = [number for number in completed if not _is_constant(groups[number], mix, settings)]
    trainable = (number for number in completed if has_trained_tokens(groups[number]))
    return varied or [next(trainable, completed[0])] if completed else []


def has_trained_tokens(group: Group) -> bool:
    """Return whether a group has a trajectory with a token to train on."""
    return group.trajectories is not None and bool(_trained_members([group.trajectories], mask_truncated=False))


def _trained_members(groups: Sequence[TrajectoryGroup], mask_truncated: bool) -> list[tuple[int, int]]:
    """Group and member index of each trajectory with tokens to train on."""
    return [
        (index, member)
        for index, group in enumerate(groups)
        for member, trajectory in enumerate(group.trajectories_G)
        if not (mask_truncated and is_truncated(trajectory))
        and any(turn.ac.tokens and not _is_masked(turn) for turn in trajectory.transitions)
    ]


def _trained_tokens(groups: Sequence[TrajectoryGroup], trained: Sequence[tuple[int, int]]) -> Tensor:
    """Mask of the sampled tokens that belong to trained trajectories and to turns that are not masked, ``(T,)``."""
    members = set(trained)
    return torch.tensor(
        [
            (index, member) in members and not _is_masked(turn)
            for index, group in enumerate(groups)
            for member, trajectory in enumerate(group.trajectories_G)
            for turn in trajectory.transitions
            for _ in turn.ac.tokens
        ]
    )


def _untempered_logprobs(groups: Sequence[TrajectoryGroup]) -> Tensor | None:
    """Logprobs of the sampled tokens under the sampler's weights alone, ``(T,)``; None if the samples have the same."""
    completions = [
        turn.ac for group in groups for trajectory in group.trajectories_G for turn in trajectory.transitions
    ]
    if not any(isinstance(completion, Completion) and completion.untempered for completion in completions):
        return None
    return torch.tensor(
        [
            logprob
            for completion in completions
            for logprob in (isinstance(completion, Completion) and completion.untempered) or completion.logprobs
        ]
    )


def _is_masked(turn: Transition) -> bool:
    return turn.metrics.get(PARSE_ERROR_MASKED_METRIC_KEY, 0.0) >= 1


def _text_labels(trajectories_D: Sequence[tuple[Group, int]]) -> dict[str, tuple[str, ...]]:
    """Text labels of each datum by name, from its group and the index of its trajectory in the group."""
    labels_D = [group.text_labels_G[index] if group.text_labels_G else {} for group, index in trajectories_D]
    names = sorted({name for labels in labels_D for name in labels})
    return {name: tuple(labels.get(name, "") for labels in labels_D) for name in names}


def rollouts_of(groups: Sequence[Group]) -> Iterator[tuple[Trajectory, Metrics]]:
    """Yield each trajectory of the groups that succeeded, with its metrics from the group's rewards."""
    for group in groups:
        if group.trajectories is not None:
            yield from zip(group.trajectories.trajectories_G, group.trajectories.metrics_G, strict=True)


def first_error(groups: Iterable[Group]) -> str:
    """Describe the first error of groups in one line; a long one keeps its end, which has the place in the code."""
    errors = (error for group in groups for error in group.errors)
    text = next((f"{error.error_type}: {error.error_message}" for error in errors), "without an error")
    line = " ".join(text.split())
    return line if len(line) <= _MAX_ERROR else f"{line[: _MAX_ERROR // 2]} ... {line[-_MAX_ERROR // 2 :]}"


def count_tokens(groups: Sequence[Group]) -> SampledTokens:
    """Count the prompt tokens and the sampled tokens of groups, those of failed attempts included."""
    return sum((group.sampled for group in groups), SampledTokens())


def compute_group_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Compute the metrics of all groups of a step, trained on or not, under tinker-cookbook's names (`safe_name`)."""
    completed = [(group.trajectories, list(group.tags)) for group in groups if group.trajectories is not None]
    trajectories, tags = [group for group, _ in completed], [tags for _, tags in completed]
    metrics = compute_trajectory_metrics(trajectories, tags) if completed else {}
    errors = Counter(error.error_type for group in groups for error in group.errors)
    return (
        {safe_name(key): value for key, value in metrics.items()}
        | compute_logprob_errors(groups)
        | compute_durations(groups)
        | (compute_completion_metrics(trajectories) if completed else {})
        | (action_shares(trajectories) if completed else {})
        | {
            "rollout_errors/total": float(errors.total()),
            "rollout_errors/groups_skipped": float(len(groups) - len(completed)),
            "rollout_errors/share_skipped": (len(groups) - len(completed)) / len(groups),
            **{f"rollout_errors/{name}": float(count) for name, count in errors.items()},
        }
    )


def compute_completion_metrics(groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
    """Compute shares over the completions of all turns: those that reached the token limit, and repeated 4-grams."""
    turns = [turn.ac for group in groups for trajectory in group.trajectories_G for turn in trajectory.transitions]
    if not turns:
        return {}
    return {
        "rollout/truncated": fmean(turn.stop_reason == "length" for turn in turns),
        "rollout/repetition": fmean(_repeated_share(turn.tokens) for turn in turns),
    }


def _repeated_share(tokens: Sequence[int]) -> float:
    """Share of the 4-grams that occur earlier in the same completion.

    >>> _repeated_share([1, 2, 1, 2, 1, 2, 1]), _repeated_share([1, 2])
    (0.5, 0.0)
    """
    grams = [tuple(tokens[start : start + 4]) for start in range(len(tokens) - 3)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def compute_durations(groups: Sequence[Group]) -> dict[str, float]:
    """Compute the mean durations of the completed groups, in seconds, and the number of tokens sampled for all groups.

    `time/sampling` is the longest time that a member of a group waited for the service, and `time/environment` is the
    rest of `time/rollout`: environments, rewards, failed attempts and the run itself. A completer of the user is not
    measured and counts as environment.
    """
    completed = [(group.duration_s, group.trajectories) for group in groups if group.trajectories is not None]
    if not completed:
        return {}
    total = fmean(duration_s for duration_s, _ in completed)
    sampling = fmean(max(map(_sampling_time, trajectories.trajectories_G)) for _, trajectories in completed)
    return {
        "time/rollout": total,
        "time/sampling": sampling,
        "time/environment": max(0.0, total - sampling),
        "rollout/num_sampled_tokens": float(count_tokens(groups).num_sample_tokens),
    }


def _sampling_time(trajectory: Trajectory) -> float:
    return sum(turn.ac.duration_s for turn in trajectory.transitions if isinstance(turn.ac, Completion))


def compute_logprob_errors(groups: Sequence[Group]) -> dict[str, float]:
    """Compute mean and maximum of the bounds of the errors of the sampled logprobs, nats; empty for exact logprobs."""
    errors = [
        error
        for group in groups
        if group.trajectories is not None
        for trajectory in group.trajectories.trajectories_G
        for turn in trajectory.transitions
        if isinstance(turn.ac, Completion)
        for error in turn.ac.errors
    ]
    if not errors:
        return {}
    return {"rollout/logprob_error": sum(errors) / len(errors), "rollout/logprob_error_max": max(errors)}


def compute_mean_kl(batches: Sequence[Batch], references: Sequence[Tensor]) -> float:
    """Compute the mean of ``log p - log p_ref`` over the sampled tokens of batches, in nats."""
    pairs = zip(batches, references, strict=True)
    total = torch.stack([_kl_distance(batch, reference_DT).sum() for batch, reference_DT in pairs]).sum()
    return (total / sum(batch.mask_DT.sum() for batch in batches)).item()


def _kl_distance(batch: Batch, reference_DT: Tensor) -> Tensor:
    assert batch.snapshot_logprobs_DT is not None
    return torch.where(batch.mask_DT, batch.snapshot_logprobs_DT - reference_DT, 0.0)


def apply_kl_penalty(
    batch: Batch, reference_DT: Tensor, coefficient: float, discount: float = 0.0, mean: float | None = None
) -> tuple[Batch, float]:
    """Subtract a KL penalty from the advantages; return the new batch and the mean KL in nats per sampled token.

    The penalty of a token is ``coefficient`` times the amount by which its ``log p - log p_ref`` exceeds the mean, as
    in tinker-cookbook's `incorporate_kl_penalty`.

    Args:
        reference_DT: reference's logprobs of the targets, in nats.
        discount: see `add_later_tokens`.
        mean: mean KL of the step, if the batch is a part of it; None for the mean of the batch.
    """
    assert batch.advantages_DT is not None
    distance_DT = _kl_distance(batch, reference_DT)
    if mean is None:
        mean = compute_mean_kl([batch], [reference_DT])
    penalty_DT = torch.where(batch.mask_DT, coefficient * (mean - distance_DT), 0.0)
    penalty_DT = add_later_tokens(batch, penalty_DT, discount)
    return replace(batch, advantages_DT=batch.advantages_DT + penalty_DT), mean


def add_later_tokens(batch: Batch, values_DT: Tensor, discount: float) -> Tensor:
    """Add to the value of each sampled token the discounted values of the later tokens of its datum.

    Every position of a datum discounts, also those between turns, as in tinker-cookbook's
    `discounted_future_sum_vectorized`. Tokens that were not sampled keep the value 0.

    Args:
        values_DT: value of each token, 0 for tokens that were not sampled.
        discount: discount per position; 0 returns `values_DT`.
    """
    if not discount:
        return values_DT
    all_DT = torch.ones_like(batch.mask_DT)
    sums_DT = discounted_returns(values_DT, all_DT, batch.offsets_D, discount=discount)
    return torch.where(batch.mask_DT, sums_DT, 0.0)


def compute_critic_metrics(trained: Sequence[TrainedBatch]) -> dict[str, float]:
    """Compute the quality of the value baseline over the sampled tokens.

    `value_loss` is half of the mean squared error. `explained_variance` is the share of the returns' variance that the
    baseline explains: 1 for a perfect baseline, 0 for a constant one, absent if all returns are equal.
    """
    returns = _sampled_tokens([minibatch.batch.returns_DT for minibatch in trained], trained)
    error = returns - _sampled_tokens([minibatch.batch.values_DT for minibatch in trained], trained)
    metrics = {"value_loss": error.square().mean().item() / 2}
    variance = returns.var(correction=0).item()
    if variance > 0:
        metrics["explained_variance"] = 1 - error.var(correction=0).item() / variance
    return metrics


def compute_policy_metrics(trained: Sequence[TrainedBatch]) -> dict[str, float]:
    """Compute the divergence of the trained policy from the sampler, under tinker-cookbook's names.

    `optim/kl_sample_train_v1` and `_v2` are the means over the sampled tokens of ``d`` and ``d ** 2 / 2``, where ``d``
    is the sampler's logprob minus the policy's, in nats. `optim/entropy` is the sampler's entropy, estimated on its own
    samples.
    """
    sampled = _sampled_tokens([minibatch.batch.sampling_logprobs_DT for minibatch in trained], trained)
    advantages = _sampled_tokens([minibatch.batch.advantages_DT for minibatch in trained], trained)
    distance = sampled - _sampled_tokens([minibatch.logprobs_DT for minibatch in trained], trained)
    return {
        "optim/kl_sample_train_v1": distance.mean().item(),
        "optim/kl_sample_train_v2": distance.square().mean().item() / 2,
        "optim/entropy": compute_entropy(trained),
        "advantage/mean": advantages.mean().item(),
        "advantage/std": advantages.std(correction=0).item(),
    }


def compute_entropy(trained: Sequence[TrainedBatch]) -> float:
    """Compute the sampler's entropy, estimated on its own samples, in nats per token."""
    sampled = _sampled_tokens([minibatch.batch.sampling_logprobs_DT for minibatch in trained], trained)
    return -sampled.mean().item()


def compute_post_kl(trained: Sequence[TrainedBatch], after_DT: Sequence[Tensor]) -> dict[str, float]:
    """Compute the divergence of the updated policy from the sampler, under tinker-cookbook's names.

    `kl_pre_post_v1` and `_v2` are the means over the sampled tokens of ``d`` and ``d ** 2 / 2``, where ``d`` is the
    logprob under the sampler's weights minus that under the weights after the update, in nats.

    Args:
        after_DT: logprobs of each batch's targets after the update.
    """
    sampled = _sampled_tokens([minibatch.batch.snapshot_logprobs_DT for minibatch in trained], trained)
    distance = sampled - _sampled_tokens(after_DT, trained)
    return {"kl_pre_post_v1": distance.mean().item(), "kl_pre_post_v2": distance.square().mean().item() / 2}


def _sampled_tokens(fields: Sequence[Tensor | None], trained: Sequence[TrainedBatch]) -> Tensor:
    pairs = zip(fields, trained, strict=True)
    return torch.cat([field_DT[minibatch.batch.mask_DT] for field_DT, minibatch in pairs if field_DT is not None])


def has_several_turns(groups: Sequence[Group]) -> bool:
    """Check whether a rollout of the groups took more than one turn."""
    return any(len(trajectory.transitions) > 1 for trajectory, _ in rollouts_of(groups))


def can_teach(group: Group, mix: RewardWeights | None, settings: AdvantageSettings, *, mask_truncated: bool) -> bool:
    """Check whether a group has succeeded, has members with different advantages, and is not masked as a whole."""
    if group.trajectories is None or _is_constant(group, mix, settings):
        return False
    return not (mask_truncated and all(map(is_truncated, group.trajectories.trajectories_G)))


def _is_constant(group: Group, mix: RewardWeights | None, settings: AdvantageSettings) -> bool:
    assert group.trajectories is not None
    if mix:
        return is_constant(group.trajectories, mix, settings)
    return has_no_advantages(group.trajectories, settings)


def _at(mask_DT: Tensor, values_T: Tensor) -> Tensor:
    """Scatter the values of the sampled tokens to their positions in the batch; 0 elsewhere."""
    return torch.zeros_like(mask_DT).masked_scatter(mask_DT != 0, values_T.to(mask_DT.dtype))


def _field(datum: tinker.Datum, name: str) -> Tensor:
    return datum.loss_fn_inputs[name].to_torch()


def _supervised(datum: tinker.Datum, mask: Tensor) -> tinker.Datum:
    """Datum with only the inputs of a forward pass."""
    targets = datum.loss_fn_inputs["target_tokens"]
    inputs = {"target_tokens": targets, "weights": types.TensorData.from_torch(mask)}
    return tinker.Datum(model_input=datum.model_input, loss_fn_inputs=inputs)
