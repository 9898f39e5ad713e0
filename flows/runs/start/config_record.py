"""Recorded config of a run, and the fields that may change."""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from prefect.runtime import flow_run
from pydantic import ValidationError
from tinker_cookbook.checkpoint_utils import CheckpointRecord

from blocks.errors import ConfigError
from blocks.storage import CONFIG, RunDirectory
from blocks.terminal import print_notice
from flows.config.base import BASE, RLHF_TAG, RunConfig
from flows.config.plain_data import FORMAT_KEY
from flows.runs.start.cookbook_compat import set_aside_config
from objectives.config.aliases import with_current_paths
from objectives.errors import explain
from objectives.objective import Objective
from tasks.training.checkpoints import step_of

# Version of config.json. Release 0.1 wrote no version, which counts as 1.
FORMAT_VERSION = 3
# First format whose runs scale terms by the batch (`objectives.term_weights.scale`) and compare completions within
# prompts.
FORMAT_OF_SCALES = 2
# First format whose runs correct for the sampler: importance ratios in the term `kl`, logprobs of the distribution that
# was sampled from.
FORMAT_OF_CORRECTIONS = 3
_SHORT_VALUES = 60  # characters

# Fields that may change when a run resumes. None changes the objective, the data or the schedule; `guards` may leave
# out bad steps.
MAY_CHANGE = {
    "base_url",
    "tracking",
    "experiment",
    "mlflow_tags",
    "storage",
    "resume",
    "if_exists",
    "accept_changes",
    "max_restarts",
    "guards",
    "task_runner",
    "health",
    "alerts",
    "budget",
    "checkpoint_every",
    "checkpoint_every_seconds",
    "checkpoint_every_tokens",
    "checkpoint_kind",
    "eval_every",
    "evaluators",
    "infrequent_eval_every",
    "infrequent_evaluators",
    "keep_last",
    "keep_best",
    "ttl_seconds",
    "register_as",
    "report",
    "promote_if",
    "promote_confidence",
    "needs_approval",
    "register_prompts",
}

# Prefixes of the files that belong to the steps of a run. A run that starts over with other settings removes them;
# otherwise it would use samples of other prompts and skip steps of other data.
OF_STEPS = ("candidates-", "guards.", "oversampled.", "held_out_terms.", "examples.", "transcripts-")

# Fields of `MAY_CHANGE` that say where a run is or how it starts. Only changes of the other fields are announced.
_NO_EFFECT = {"base_url", "tracking", "experiment", "mlflow_tags", "storage", "resume", "if_exists", "accept_changes"}


@dataclass(frozen=True, slots=True)
class RecordedConfig:
    """Content of a run's config.json.

    Attributes:
        format_version: Version of the format that the run was started with. Changed conventions depend on it, so that
            an older run keeps its own.
        fields: Config fields, with import paths of earlier releases replaced.
    """

    format_version: int
    fields: dict[str, Any]

    @classmethod
    def parse(cls, content: bytes, location: str) -> RecordedConfig:
        """Parse a config.json.

        Raises:
            ConfigError: The content is no JSON object with a numeric version, or a later release wrote it.
        """
        try:
            fields = json.loads(content)
        except ValueError:
            fields = None
        if not isinstance(fields, dict) or not isinstance(version := fields.pop(FORMAT_KEY, 1), int):
            raise ConfigError(f"{location}/{CONFIG} is not the config of a run: restore it to resume the run.")
        if version > FORMAT_VERSION:
            raise ConfigError(
                f"{location}/{CONFIG} has format version {version}, but this release supports up to {FORMAT_VERSION}: "
                "upgrade tinker-flows."
            )
        return cls(version, with_current_paths(fields))


def recorded_format(directory: RunDirectory) -> int:
    """Return the format version that a run was started with; the current one without a record."""
    recorded = directory.read_bytes(CONFIG)
    return RecordedConfig.parse(recorded, directory.location).format_version if recorded else FORMAT_VERSION


def keep_recorded_conventions(objective: Objective, directory: RunDirectory) -> None:
    """Give an objective the conventions of the release that started its run: scales of terms, `kl` without ratios."""
    started_with = recorded_format(directory)
    if started_with < FORMAT_OF_SCALES:
        objective.keep_conventions_of_0_1()
    if started_with < FORMAT_OF_CORRECTIONS:
        objective.keep_unweighted_kl()


def check_config(
    directory: RunDirectory, config: RunConfig, start: CheckpointRecord | None, restarts: Sequence[str]
) -> None:
    """Record the config of a new run; check that a resumed run has the same config.

    Args:
        start: Newest checkpoint of the run itself; None before its first checkpoint.
        restarts: Reasons of the restarts within this start; empty at its first attempt. `resume: never` allows them,
            and a second start of the same flow run.

    Raises:
        ConfigError: The recorded config differs or is damaged, or `resume` is `never` and the name is in use.
    """
    if start and config.resume == "never" and not restarts:
        is_own = flow_run.get_id() is not None and start.get("flow_run_id", None) == flow_run.get_id()
        if not is_own:
            raise ConfigError(
                f"The run name {config.run_name!r} is in use in {directory.location} and resume is `never`: "
                "choose another run_name, or set resume to auto to resume that run."
            )
    if set_aside_config(directory) or start is None:
        if start is None and trains_otherwise(directory, config):
            _remove_files_of_steps(directory, config)
        fields = {FORMAT_KEY: FORMAT_VERSION, **config.model_dump(mode="json")}
        directory.write_bytes(CONFIG, json.dumps(fields, indent=2).encode())
        return
    check_unchanged(directory, config, start)
    if not restarts:
        _announce_changes(directory, config)


def trains_otherwise(directory: RunDirectory, config: RunConfig, ignored: Collection[str] = ()) -> bool:
    """Return whether the recorded run trained with other settings than a config.

    Args:
        ignored: fields that may differ in addition to `MAY_CHANGE`.
    """
    try:
        return not {*changed_fields(directory, config)} <= {*ignored}
    except ConfigError:  # the config of another method, or a damaged one
        return True


def _remove_files_of_steps(directory: RunDirectory, config: RunConfig) -> None:
    names = [name for name in directory.names() if name.startswith(OF_STEPS)]
    for name in names:
        directory.remove(name)
    if names:
        print_notice(
            f"{config.run_name} starts over with other settings: removed {len(names)} files of the steps of its "
            "earlier start."
        )


def check_unchanged(directory: RunDirectory, config: RunConfig, newest: CheckpointRecord) -> None:
    """Check that a run has the config that it was started with, except for fields that may change.

    Args:
        newest: Newest checkpoint of the run.

    Raises:
        ConfigError: The recorded config differs or is damaged.
    """
    changes = {key: change for key, change in _changes(directory, config).items() if key not in MAY_CHANGE}
    if changes:
        parts = [part for key, change in sorted(changes.items()) for part in _changed_parts(key, *change)]
        changed = [_describe_change(*part) for part in parts]
        place = " in the directory where the run was started" if any(_is_other_path(*part) for part in parts) else ""
        is_stage = RLHF_TAG in config.mlflow_tags  # rlhf has no fields `resume` and `if_exists`
        remedies = [f"restore it{place}", "choose another run_name"]
        if newest.final and _is_longer(changes):
            fork = f"run_name=NEW resume={shlex.quote(config.run_name)}@final"
            remedies.append(f"fork {_fork_of_stage(config, fork) if is_stage else f'the run with {fork}'}")
        if not is_stage:
            remedies.append("start anew with if_exists=delete")
        *most, last = remedies
        raise ConfigError(
            f"The run {config.run_name!r} (now at step {step_of(newest)}) was started with another "
            f"{', '.join(changed)}: {', '.join(most)}, or {last}; the first config is {directory.location}/{CONFIG}."
        )


def _fork_of_stage(config: RunConfig, fork: str) -> str:
    method = flow_run.get_flow_name() or "METHOD"
    no_init = "" if config.init_from == BASE else " init_from=base"  # a config may not set both fields
    return f"the stage with `tinker-flows run {method} --config FILE {fork}{no_init}`"


def _is_longer(changes: Mapping[str, tuple[Any, Any]]) -> bool:
    """Return whether a changed number of steps or epochs asks for more of them."""
    numbers = [changes[name] for name in ("num_steps", "num_epochs") if name in changes]
    return any(now is None or (before is not None and now > before) for before, now in numbers)


def _changed_parts(key: str, before: Any, now: Any) -> list[tuple[str, Any, Any]]:
    """Return the dotted names of the parts of a field that differ, with both values."""
    if not (isinstance(before, Mapping) and isinstance(now, Mapping) and before.keys() == now.keys()):
        return [(key, before, now)] if before != now else []
    return [part for name in now for part in _changed_parts(f"{key}.{name}", before[name], now[name])]


def _is_other_path(_: str, before: Any, now: Any) -> bool:
    """Return whether a relative path has become an absolute one of a file of that name."""
    if not (isinstance(before, str) and isinstance(now, str)):
        return False
    old_path, new_path = PurePath(before), PurePath(now)
    return new_path.is_absolute() and not old_path.is_absolute() and new_path.name == old_path.name


def _describe_change(key: str, before: Any, now: Any) -> str:
    """Return a field with both values, if they are short."""
    values = f"{before}, now {now}"
    return f"{key} ({values})" if len(values) <= _SHORT_VALUES else key


def _announce_changes(directory: RunDirectory, config: RunConfig) -> None:
    """Print the fields that take effect from now on with other values than at the start of the run."""
    changes = _changes(directory, config)
    changed = [f"{key} {now} (was {before})" for key, (before, now) in sorted(changes.items()) if key not in _NO_EFFECT]
    if changed:
        print_notice(f"{config.run_name} continues with another {', '.join(changed)}.")


def changed_fields(directory: RunDirectory, config: RunConfig) -> list[str]:
    """Return the immutable fields in which a config differs from the recorded one; empty without a record."""
    return sorted(_changes(directory, config).keys() - MAY_CHANGE)


def _changes(directory: RunDirectory, config: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Return the recorded and the present value of each field in which they differ."""
    recorded = directory.read_bytes(CONFIG)
    if recorded is None:
        return {}
    recorded_fields = RecordedConfig.parse(recorded, directory.location).fields
    try:  # validation fills in fields that later releases added
        before, now = (
            type(config).model_validate(_without_executions(fields)).model_dump(mode="json")
            for fields in (recorded_fields, config.model_dump(mode="json"))
        )
    except ValidationError as error:
        what = f"The config of the run {config.run_name!r}, {directory.location}/{CONFIG},"
        if not {entry["type"] for entry in error.errors(include_url=False)} & {"extra_forbidden", "missing"}:
            raise ConfigError(
                f"{what} is invalid ({explain(error)}): restore it to resume the run, or choose another run_name."
            ) from error
        raise ConfigError(
            f"{what} is that of another method ({explain(error)}): choose another run_name, or resume the run with "
            "`tinker-flows resume`."
        ) from error
    return {key: (before[key], value) for key, value in now.items() if value != before[key]}


def _without_executions(fields: dict[str, Any]) -> dict[str, Any]:
    """Drop the `execution` of each term, which says where it runs; release 0.1 had other values of it."""
    objective = fields.get("objective")
    if not objective or not objective.get("regularizers"):
        return fields
    terms = [{key: term[key] for key in term if key != "execution"} for term in objective["regularizers"]]
    return fields | {"objective": objective | {"regularizers": terms}}
