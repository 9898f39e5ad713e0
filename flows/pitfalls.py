"""Settings that are known to go wrong: said in the run's log when it starts, and on its MLflow run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import tinker
from prefect.logging import get_run_logger
from tinker_cookbook.checkpoint_utils import CheckpointRecord, get_renderer_name_from_checkpoint

from blocks.errors import ConfigError
from flows.fork import forks
from flows.renderers import renderer_names, values_of
from flows.run import Run
from flows.train_config import TrainConfig
from flows.warn import TAG
from objectives.objective import CROSS_ENTROPY
from tasks.renderer import recommended_renderers

# The published rate for LoRA is ten times that of full fine-tuning.
_FAR_BELOW = 8
_LARGE_BETA = 0.5
_BETA_LOSSES = ("dpo", "kto")


class Pitfall(NamedTuple):
    """One of them.

    Attributes:
        key: names the tag.
        text: a sentence for the user.
    """

    key: str
    text: str


def warn_of_pitfalls(run: Run, config: TrainConfig) -> None:
    """Say those of a config, and of the checkpoint that it starts from; the tag keeps each."""
    for key, text in [*pitfalls_of(config), *pitfalls_of_checkpoint(run.session, run.start, config)]:
        get_run_logger().warning("%s", text)
        run.log.tag(f"{TAG}.pitfall.{key}", text)


def pitfalls_of(config: TrainConfig) -> Iterator[Pitfall]:
    """What of a config is known to go wrong."""
    fields = config.model_dump()
    yield from _of_rate(config)
    yield from _of_renderer(config)
    estimator = fields.get("advantage", {}).get("estimator", "gae")
    if estimator != "gae" and 1 in values_of(fields, "group_size"):
        yield Pitfall(
            "group_of_one",
            "group_size is 1: an answer is compared with the others of its group, so every advantage is 0 and nothing "
            "is learned; take 4 or more.",
        )
    yield from _of_paths(config, fields)
    base = config.objective.base_loss
    beta = 0 if isinstance(base, str) else base.params.get("beta", 0)
    if _base_name(config) in _BETA_LOSSES and isinstance(beta, int | float) and beta > _LARGE_BETA:
        yield Pitfall(
            "beta",
            f"objective.base_loss.params.beta is {beta:g}, which holds the policy at its reference: 0.1 is usual, and "
            f"above {_LARGE_BETA:g} hardly anything is learned.",
        )


def pitfalls_of_checkpoint(
    session: tinker.ServiceClient, start: CheckpointRecord | None, config: TrainConfig
) -> Iterator[Pitfall]:
    """A fork is best written to as its parent was."""
    path = start.state_path if start else None
    if not path or not forks(config):
        return
    before, now = get_renderer_name_from_checkpoint(session, path), renderer_names(config)
    if before and now and before not in now:
        yield Pitfall(
            "checkpoint_renderer",
            f"renderer_name is {' and '.join(now)}, and the checkpoint {config.resume} was trained with {before}: take "
            "that, or train on until the new format is learned.",
        )


def _base_name(config: TrainConfig) -> str:
    base = config.objective.base_loss
    return base if isinstance(base, str) else base.name


def _of_rate(config: TrainConfig) -> Iterator[Pitfall]:
    from flows.learning_rate import is_local, recommended_rate  # it takes a second, and most configs are never run

    if _base_name(config) != CROSS_ENTROPY:
        return  # the rule is for imitation: preferences and rewards often take less
    if not (is_local(config.model) or recommended_renderers(config.model)):
        return  # it would be looked up on the hub
    with suppress(ConfigError):
        rate = recommended_rate(config.model)
        if config.learning_rate < rate / _FAR_BELOW:
            yield Pitfall(
                "learning_rate",
                f"learning_rate is {config.learning_rate:g}, as for full fine-tuning: an adapter takes about ten times "
                f"as much, by the published rule {rate:.2g} for {config.model}; learning_rate: auto takes that.",
            )


def _of_renderer(config: TrainConfig) -> Iterator[Pitfall]:
    known = recommended_renderers(config.model)
    for name in renderer_names(config):
        if known and name not in known:
            yield Pitfall(
                "renderer",
                f"renderer_name is {name}, and {config.model} was made with {' or '.join(known)}: tokens that it never "
                "saw cost quality without a word.",
            )


def _of_paths(config: TrainConfig, fields: Mapping[str, Any]) -> Iterator[Pitfall]:
    trained, tested = set[Path](), set[Path]()
    for name, path in _paths({key: value for key, value in fields.items() if key != "evaluators"}):
        (tested if "test" in name or "eval" in name else trained).add(path)
    tested |= {path for _, path in _paths([each.params for each in config.evaluators])}
    for path in sorted(trained & tested):
        yield Pitfall("evaluation", f"{path} is trained and evaluated on: what is measured there is memory, not skill.")


def _paths(fields: Any) -> Iterator[tuple[str, Path]]:
    """Every file that a field ending in `path` names, resolved, by the field's name."""
    if isinstance(fields, Mapping):
        for name, value in fields.items():
            if isinstance(value, str) and value and str(name).endswith("path"):
                yield str(name), Path(value).expanduser().resolve()
            else:
                yield from _paths(value)
    elif isinstance(fields, Sequence) and not isinstance(fields, str):
        for each in fields:
            yield from _paths(each)
