"""Output of a run before it trains: warnings about risky settings, and the first batch with its weights."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple

import tinker
import torch
from prefect.logging import get_run_logger
from tinker_cookbook.checkpoint_utils import CheckpointRecord, get_renderer_name_from_checkpoint

from blocks.errors import ConfigError
from blocks.files.local import path_of
from blocks.terminal import print_notice
from flows.config.base import BASE
from flows.config.distill import SamplingConfig
from flows.config.loader import field_values, renderer_names
from flows.config.rl import RlConfig
from flows.config.rollout import OverlongConfig, RolloutConfig
from flows.config.train import TrainConfig
from flows.monitoring.run_tags import note_warning
from flows.runs.run import Run
from flows.runs.start.fork import is_fork, named_origin
from flows.runs.tracking.lineage import log_datasets
from objectives.batch import Batch
from objectives.config.term_lookup import find_term
from objectives.labels import MEMBER, NONE, PROMPT
from objectives.objective import CROSS_ENTROPY, Objective
from objectives.term import Term
from tasks.common.digests import digest_batch
from tasks.common.renderers import recommended_renderers
from tasks.common.task import call, opaque_argument
from tasks.reports.first_batch import first_group, print_datums, weighted_datums, write_first_batch
from tasks.reports.summary import DATA_TAG
from tasks.rl.health import CONSTANT, REWARD, REWARD_SUM
from tasks.rl.named_rewards import TOTAL
from tasks.rl.rollouts.hooks import PREFIX
from tasks.rl.rollouts.truncation import OVERLONG

# The published LoRA rate is ten times that of full fine-tuning, so a rate this many times lower is one for full
# fine-tuning.
_FAR_BELOW = 8
_LARGE_BETA = 0.5
_BETA_LOSSES = ("dpo", "kto")


class Pitfall(NamedTuple):
    """Risky setting.

    Attributes:
        key: Suffix of the MLflow tag.
        text: Warning for the user, one sentence.
    """

    key: str
    text: str


def check_passes(config: TrainConfig, objective: Objective) -> None:
    """Check that the backend of the objective allows the forward pass that a guard needs.

    Raises:
        ConfigError: A guard needs a forward pass before each update, and the backend takes only one pass.
    """
    if config.guards.needs_forward_pass and objective.backend == "server":
        raise ConfigError(
            "A guard with the policy skip needs a forward pass before each update, and objective.backend 'server' "
            "takes only one: set objective.backend to 'auto', or choose another guard policy."
        )


def warn_of_pitfalls(run: Run, config: TrainConfig) -> None:
    """Log and tag the pitfalls of a config and of the checkpoint that the run starts from."""
    for key, text in [*pitfalls_of(config), *pitfalls_of_checkpoint(run.session, run.start, config)]:
        note_warning(run.log, f"pitfall.{key}", text)


def pitfalls_of(config: TrainConfig) -> Iterator[Pitfall]:
    """Yield the risky settings of a config."""
    fields = config.model_dump()
    yield from _of_checkpoints(config)
    yield from _of_rate(config)
    yield from _of_renderer(config)
    yield from _of_alpha(config)
    compares_rewards = isinstance(config, RlConfig) and config.advantage.estimator != "gae"
    compares_rewards = compares_rewards or fields.get("train_on_rewards", False)
    if compares_rewards and 1 in field_values(fields, "group_size"):
        yield Pitfall(
            "group_of_one",
            "group_size is 1: advantages of rewards compare the completions of a group, so all of them are 0 and the "
            "rewards teach nothing; use 4 or more.",
        )
    yield from _of_paths(config, fields)
    if isinstance(config, RlConfig | SamplingConfig):
        yield from _of_temperature(config.rollout)
    if isinstance(config, RlConfig):
        yield from _of_rewards(config)
        yield from _of_oversampling(config.rollout)
    base = config.objective.base_loss
    beta = 0 if isinstance(base, str) else base.params.get("beta", 0)
    if _base_name(config) in _BETA_LOSSES and isinstance(beta, int | float) and beta > _LARGE_BETA:
        yield Pitfall(
            "beta",
            f"objective.base_loss.params.beta is {beta:g}, which keeps the policy at its reference: 0.1 is usual, and "
            f"above {_LARGE_BETA:g} the model hardly learns.",
        )
    terms = [term.name for term in config.objective.regularizers if term.enabled]
    if _base_name(config) == "kto" and terms:
        yield Pitfall(
            "kto",
            f"{', '.join(terms)} also see the completions with mismatched prompts that kto adds to a batch as "
            "completions of these prompts: use dpo to train terms on the pairs alone.",
        )


def _of_alpha(config: TrainConfig) -> Iterator[Pitfall]:
    specs = [spec for spec in config.objective.regularizers if spec.enabled and "alpha" in spec.params]
    idle = [
        spec.name
        for spec in specs
        if spec.estimator == "score_function" and not _reads_alpha(find_term(spec.fn or spec.name))
    ]
    if idle:
        yield Pitfall(
            "alpha",
            f"alpha of {', '.join(idle)} has no effect with the estimator score_function: remove it, or use an "
            "estimator that compares completions, such as minimum_risk_mean.",
        )


def _reads_alpha(term: Term) -> bool:
    """Return whether the functions of a scored term have a parameter `alpha` of their own."""
    functions = [function for function in (term.evaluate, term.prepare) if function]
    return any("alpha" in signature(function).parameters for function in functions)


def warning_of_split_rollouts(objective: Objective, batch: Batch) -> str:
    """Return a warning if `kl` trains on conversations that are split into several datums; empty otherwise."""
    labels = [batch.labels_D.get(name) for name in (PROMPT, MEMBER)]
    pairs = [label_D for label_D in labels if label_D is not None]
    if len(pairs) < len(labels) or not any(term.term.name == "kl" for term in objective.regularizers):
        return ""
    # Each datum without the label is a conversation of its own.
    num_members = len(torch.stack([label_D[pairs[1] != NONE] for label_D in pairs]).unique(dim=1).T)
    num_members += int((pairs[1] == NONE).sum())
    if num_members == batch.num_datums:
        return ""
    return (
        f"The {num_members} conversations of the first batch are split into {batch.num_datums} datums, because the "
        "renderer changes earlier turns. The term kl weighs each datum by the importance ratio of its own tokens, so "
        "its gradient is not exactly that of the divergence of whole conversations: use a renderer that keeps the "
        "thinking of earlier turns."
    )


def warn_of_equal_rewards(run: Run, config: TrainConfig, metrics: Mapping[str, float]) -> None:
    """Warn after the first step if the rewards of each group are equal, so that the policy loss has no gradient."""
    if not isinstance(config, RlConfig) or config.advantage.estimator == "gae":
        return
    # The share of groups with equal rewards is measured, or follows from that of groups with different rewards.
    all_equal = metrics[CONSTANT] == 1 if CONSTANT in metrics else metrics.get("env/all/by_group/frac_mixed") == 0
    if not all_equal:
        return
    reward = metrics.get(REWARD_SUM, metrics.get(REWARD, float("nan")))
    text = (
        f"In every group of the first step, all rewards are equal (mean {reward:.4g}), so the rewards teach nothing: "
        "make the problems easier or harder, give partial rewards, or sample larger groups."
    )
    note_warning(run.log, "equal_rewards", text)


def pitfalls_of_checkpoint(
    session: tinker.ServiceClient, start: CheckpointRecord | None, config: TrainConfig
) -> Iterator[Pitfall]:
    """Yield a pitfall if a run uses another chat format than the weights that it starts from."""
    path = start.state_path if start else None
    if not path or not (is_fork(config) or config.init_from != BASE):
        return
    before, now = get_renderer_name_from_checkpoint(session, path), renderer_names(config)
    if before and now and before not in now:
        yield Pitfall(
            "checkpoint_renderer",
            f"renderer_name is {' and '.join(now)}, but {named_origin(config)}, which was trained with {before}: use "
            f"{before}, or expect further training before the model follows the new format.",
        )


def _base_name(config: TrainConfig) -> str:
    base = config.objective.base_loss
    return base if isinstance(base, str) else base.name


def _of_checkpoints(config: TrainConfig) -> Iterator[Pitfall]:
    if not config.has_cadence:
        yield Pitfall(
            "no_checkpoints",
            "checkpoint_every, checkpoint_every_seconds and checkpoint_every_tokens are 0, so only the final "
            "checkpoint is saved: a run that is killed or rolled back starts over at its first step.",
        )
    elif config.checkpoint_kind == "sampler":
        yield Pitfall(
            "no_state",
            "checkpoint_kind is 'sampler', whose checkpoints cannot be resumed from: a run that is killed or rolled "
            "back starts over at its first step; set it to 'both' to resume.",
        )
    if config.keep_best and (config.checkpoint_every_seconds or config.checkpoint_every_tokens):
        yield Pitfall(
            "keep_best",
            f"keep_best compares checkpoints by {config.keep_best.metric} at their steps, but "
            "checkpoint_every_seconds and checkpoint_every_tokens save them at any step: a checkpoint where the "
            "metric is not measured is never the best.",
        )
    elif (
        config.keep_best
        and config.keep_best.metric.startswith("test/")
        and not config.infrequent_evaluators
        and (config.eval_every == 0 or config.checkpoint_every % config.eval_every)
    ):
        yield Pitfall(
            "keep_best",
            f"keep_best compares checkpoints by {config.keep_best.metric} at their steps, but checkpoint_every is "
            f"{config.checkpoint_every} and eval_every {config.eval_every}: set checkpoint_every to a multiple of "
            "eval_every, because a checkpoint where the metric is not measured is never the best.",
        )


def _of_temperature(rollout: RolloutConfig) -> Iterator[Pitfall]:
    if rollout.completer is not None:
        return
    distribution = rollout.distribution()
    if not distribution.is_plain and rollout.logprobs == "service":
        yield Pitfall(
            "temperature",
            f"rollout.logprobs is service with {distribution.describe()}, but a service returns the logprobs of the "
            "model itself: the loss and optim/kl_sample_train_v1 take the samples for samples of that policy, so the "
            "gradient is biased and no metric shows it; set rollout.logprobs to sampled.",
        )
    if rollout.top_k is not None or rollout.top_p < 1:
        yield Pitfall(
            "support",
            f"Samples of {distribution.describe()} never contain the unlikely tokens, so no importance ratio corrects "
            "for their absence: the gradient is that of the likely tokens alone; sample from all tokens for an "
            "unbiased one.",
        )


def _of_oversampling(rollout: RolloutConfig) -> Iterator[Pitfall]:
    if rollout.oversampling_factor > 1:
        yield Pitfall(
            "oversampling",
            f"rollout.oversampling_factor is {rollout.oversampling_factor:g}: steps train on the groups that finish "
            "first, so long completions are rarer in training than among the policy's samples, and problems with long "
            "answers may never be trained on; compare oversampling/length_kept with oversampling/length_all_max. "
            "Tokens sampled for cancelled requests are unknown and missing from cost and budget: at most "
            "oversampling/uncounted_tokens_max per step.",
        )


def _of_rewards(config: RlConfig) -> Iterator[Pitfall]:
    hook = config.rollout.hook
    if hook and config.rewards and not any(name == TOTAL or name.startswith(PREFIX) for name in config.rewards):
        yield Pitfall(
            "hook",
            f"rewards names neither total nor a reward of the hook {hook.builder}: rewards that the hook adds are not "
            f"trained on; name total, or {PREFIX}ACTION/reward with the name of an action of the hook.",
        )
    termination = config.rollout.termination
    if termination and termination.zero_reward_on_limit and config.rewards and TOTAL not in config.rewards:
        yield Pitfall(
            "termination",
            "rollout.termination.zero_reward_on_limit lowers the total reward, which rewards does not name: episodes "
            "that a limit ends are trained on with their named rewards; name total, or remove it.",
        )
    penalized = isinstance(config.rollout.truncated, OverlongConfig)
    if penalized and config.rewards and not {TOTAL, OVERLONG} & config.rewards.keys():
        yield Pitfall(
            "overlong",
            f"rewards names neither total nor {OVERLONG}, the reward of rollout.truncated: long completions are not "
            "penalized; name one of them.",
        )


def _of_rate(config: TrainConfig) -> Iterator[Pitfall]:
    from flows.config.learning_rate import is_local, recommended_rate

    if _base_name(config) != CROSS_ENTROPY:
        return  # the rule covers supervised training: preferences and rewards often need a smaller rate
    if not (is_local(config.model) or recommended_renderers(config.model)):
        return  # other models would need a look-up on the Hugging Face Hub
    with suppress(ConfigError):
        rate = recommended_rate(config.model)
        if config.learning_rate < rate / _FAR_BELOW:
            yield Pitfall(
                "learning_rate",
                f"learning_rate is {config.learning_rate:g}, as for full fine-tuning, but LoRA needs about ten times "
                f"as much: the published rule gives {rate:.2g} for {config.model}; set learning_rate to auto.",
            )


def _of_renderer(config: TrainConfig) -> Iterator[Pitfall]:
    known = recommended_renderers(config.model)
    for name in renderer_names(config):
        if known and name not in known:
            yield Pitfall(
                "renderer",
                f"renderer_name is {name}, but {config.model} was trained with {' or '.join(known)}: unfamiliar "
                "control tokens silently reduce quality.",
            )


def _of_paths(config: TrainConfig, fields: Mapping[str, Any]) -> Iterator[Pitfall]:
    trained, tested = set[Path](), set[Path]()
    for name, path in _paths({key: value for key, value in fields.items() if "evaluators" not in key}):
        (tested if "test" in name or "eval" in name else trained).add(path)
    evaluators = (*config.evaluators, *config.infrequent_evaluators)
    tested |= {path for _, path in _paths([evaluator.params for evaluator in evaluators])}
    for path in sorted(trained & tested):
        yield Pitfall("evaluation", f"{path} is used for training and evaluation: the results measure memorization.")


def _paths(fields: Any) -> Iterator[tuple[str, Path]]:
    """Yield the name and resolved path of every field whose name ends in `path`."""
    if isinstance(fields, Mapping):
        for name, value in fields.items():
            if isinstance(value, str) and value and str(name).endswith("path"):
                if path := path_of(value):
                    yield str(name), path.resolve()
            else:
                yield from _paths(value)
    elif isinstance(fields, Sequence) and not isinstance(fields, str):
        for item in fields:
            yield from _paths(item)


def choose_estimators(run: Run, config: TrainConfig, objective: Objective, batch: Batch, *, can_sample: bool) -> None:
    """Choose the estimators that the config leaves open from the first batch, and record the choice.

    Args:
        can_sample: whether the run can sample candidates.
    """
    for name, reason in objective.choose_estimators(batch, can_sample=can_sample).items():
        text = f"Term {name} is estimated by {reason}."
        get_run_logger().info("%s", text)
        print_notice(f"{config.run_name}: {text}")
        run.log.tag(f"tinker_flows.estimator.{name}", reason)


def warn_about_candidates(run: Run, config: TrainConfig, objective: Objective) -> None:
    """Warn if the config sets candidates, but no term needs them, or if they are left out of the balancing."""
    is_set = getattr(config, "candidates", "auto") not in ("auto", "off")
    on_candidates = [term.name for term in objective.regularizers if term.on_candidates]
    if is_set and not on_candidates and not objective.has_open_choice:  # open if the first step is skipped
        text = "candidates is set, but no term needs them on this data, so none are sampled: remove candidates."
        note_warning(run.log, "pitfall.candidates", text)
    if on_candidates and objective.balance:
        text = (
            f"balance does not weigh {', '.join(on_candidates)} against the base loss, because a term on sampled "
            "candidates has its gradient at other tokens: set its weight or a target."
        )
        note_warning(run.log, "pitfall.balance", text)


def announce_first_batch(
    run: Run, config: TrainConfig, objective: Objective, batch: Batch, digests: Mapping[str, str], *, is_sampled: bool
) -> None:
    """Print and store the first batch of a new run with its loss weights, and log its data.

    Args:
        digests: digests of the data files.
        is_sampled: whether the batch was sampled from the model, so that its digest identifies no data.
    """
    tokenizer, name = run.client.get_tokenizer(), config.run_name
    datums = weighted_datums(batch, tokenizer)
    print_datums(name, first_group(batch, datums), tokenizer, sys.stderr)
    call(write_first_batch, run.directory, run.log, name, opaque_argument(datums), tokenizer)
    digest = "" if is_sampled else digest_batch(batch)
    if digest:
        run.log.tag(DATA_TAG, digest)
    if text := warning_of_split_rollouts(objective, batch):
        note_warning(run.log, "split_rollouts", text)
    log_datasets(run.log, config, digests, digest)
