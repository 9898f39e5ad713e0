"""Summary of a run for its report and the terminal: verdict, facts, warnings and the next commands."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from urllib.parse import urlsplit

from mlflow.entities import Run as MlflowRun
from mlflow.entities import RunData
from tinker_cookbook.checkpoint_utils import CheckpointRecord

from blocks.storage import CONFIG, RunDirectory, RunStorage
from objectives.term import BASE
from tasks.reports.tables import HELD_OUT, HeldOutRow, History, held_out_rows, is_headline, recent_term_rows
from tasks.training.checkpoints import Records, read_records, step_of
from tasks.training.held_out import read_batch_values
from tasks.training.tracking.model_registry import VERSION_TAG

STOPPED_TAG = "tinker_flows.stopped"
TERM_TAG = "tinker_flows.term."
# Prefixes of the tags whose values are warnings for the user, each with the words that precede the warning. Only
# release 0.1 wrote the tags of guards and skipped evaluations; later releases write them as warnings.
_NOTES = {
    "tinker_flows.warning.": "",
    "tinker_flows.guard.": "",
    "tinker_flows.skipped.": "An evaluation was skipped. ",
    "tinker_flows.restart.": "The run was restarted: ",
}
# Tag with the digest of the first batch, which tells two versions of the data apart.
DATA_TAG = "tinker_flows.first_batch"
DATA_PARAMS = ("data.builder", "environment.builder", "comparisons.builder", "questions.builder", "data.path")
_UNITS = {
    "num_train_tokens": "tokens in passes",
    "num_prefill_tokens": "prompt tokens",
    "num_sample_tokens": "tokens sampled",
}


@dataclass(frozen=True, slots=True)
class RunSummary:
    """Answers to the first questions about a run.

    Attributes:
        verdict: sentence that says whether the run needs attention, and its main result.
        facts: names and values, such as the model and the cost.
        held_out: metrics of the held-out data at the first and the last evaluation.
        headlines: rows of `held_out` with the main metrics.
        warnings: warnings, each a sentence.
        definitions: definition of each term by its name in the history.
        weights: tinker:// path of the newest weights with optimizer state; empty if no checkpoint has them.
        commands: purpose and text of the commands that the user may need next.
    """

    verdict: str
    facts: tuple[tuple[str, str], ...]
    held_out: tuple[HeldOutRow, ...]
    headlines: tuple[HeldOutRow, ...]
    warnings: tuple[str, ...]
    definitions: Mapping[str, str]
    weights: str
    commands: tuple[tuple[str, str], ...]


def summarize(run_name: str, run: MlflowRun, directory: RunDirectory, history: History) -> RunSummary:
    """Summarize a run from its MLflow run, its record and its metrics."""
    records = read_records(directory)
    warnings = run_warnings(run.data.tags, history)
    rows = held_out_rows(history, read_batch_values(directory))
    return RunSummary(
        verdict=_verdict(run.data.tags, warnings, rows),
        facts=tuple(_facts(run, records, history)),
        held_out=tuple(rows),
        headlines=tuple(row for row in rows if not row.is_of_term and is_headline(f"{HELD_OUT}{row.metric}")),
        warnings=warnings,
        definitions={
            key.removeprefix(TERM_TAG): text for key, text in run.data.tags.items() if key.startswith(TERM_TAG)
        },
        weights=next((path for record in records.checkpoints if (path := record.state_path)), ""),
        commands=tuple(_commands(run_name, directory, records, run.data, _main_term(history))),
    )


def run_warnings(tags: Mapping[str, str], history: History) -> tuple[str, ...]:
    """Return sentences about warnings, guards, skipped evaluations, restarts and skipped terms of a run."""
    noted = [
        prefix + text for start, prefix in _NOTES.items() for key, text in sorted(tags.items()) if key.startswith(start)
    ]
    return (*noted, *(_skipped(key, points) for key, points in history.items() if key.endswith("/skipped")))


def _skipped(key: str, points: Sequence[tuple[int, float]]) -> str:
    steps = [str(step) for step, value in points if value]
    named = ", ".join(steps[:5]) + (", ..." if len(steps) > 5 else "")
    name = key.removeprefix("term/").removesuffix("/skipped")
    return f"Term {name} was skipped at {len(steps)} step{'s' if len(steps) > 1 else ''} ({named})."


def describe_cost(metrics: Mapping[str, float]) -> str:
    """Describe time, tokens and price of a run by its cost metrics.

    >>> describe_cost({"cost/hours": 0.1859, "cost/num_train_tokens": 56851.0, "cost/usd": 0.0})
    '11.2 min, 56,851 tokens in passes, $0'
    >>> describe_cost({"cost/hours": 0.005}), describe_cost({"cost/hours": 1.5})
    ('18 s, price unknown', '1 h 30 min, price unknown')
    >>> describe_cost({"cost/num_sample_tokens": 16.0, "cost/num_scoring_tokens": 6.0, "cost/usd": 0.0})
    '16 tokens sampled (6 of them to score sequences, one each), $0'
    """
    return ", ".join(filter(None, _cost_parts(metrics)))


def format_hours(hours: float) -> str:
    """Format a duration for people.

    >>> [format_hours(seconds / 3600) for seconds in (18, 180, 3598, 5489)]
    ['18 s', '3.0 min', '1 h 0 min', '1 h 31 min']
    """
    seconds = round(hours * 3600)
    if seconds < 60:
        return f"{seconds} s"
    if round(seconds / 60, 1) < 60:
        return f"{seconds / 60:.1f} min"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60} min"


def format_steps(num_done: int, num_steps: int) -> str:
    """Format the completed steps of a run.

    >>> format_steps(3, 24), format_steps(1, 1)
    ('3 of 24 steps', '1 of 1 step')
    """
    return f"{num_done} of {num_steps} step{'s' if num_steps != 1 else ''}"


def _cost_parts(metrics: Mapping[str, float]) -> tuple[str, str, str]:
    """Time, tokens and price of a run; an unknown time or number of tokens is empty."""
    time = format_hours(metrics["cost/hours"]) if "cost/hours" in metrics else ""
    tokens = [f"{metrics[f'cost/{name}']:,.0f} {unit}" for name, unit in _UNITS.items() if metrics.get(f"cost/{name}")]
    if num_scoring := metrics.get("cost/num_scoring_tokens"):
        part = "all" if num_scoring == metrics.get("cost/num_sample_tokens") else f"{num_scoring:,.0f}"
        tokens[-1] += f" ({part} of them to score sequences, one each)"
    return time, ", ".join(tokens), f"${metrics['cost/usd']:.4g}" if "cost/usd" in metrics else "price unknown"


def storage_option(run_name: str, directory: str) -> str:
    """Return the option by which a command finds a run; empty for the default storage."""
    if directory == RunStorage().run_directory(run_name).location:
        return ""
    return f" --storage {shlex.quote(directory.removesuffix(f'/{run_name}'))}"


def _verdict(tags: Mapping[str, str], warnings: Sequence[str], rows: Sequence[HeldOutRow]) -> str:
    counted = f"{len(warnings)} warning{'s' if len(warnings) > 1 else ''}" if warnings else "No warning"
    row = next((row for row in rows if row.is_compared), None)
    result = f"; {row.metric} on held-out data went from {row.before} to {row.after}" if row else ""
    return " ".join(filter(None, [tags.get(STOPPED_TAG, ""), f"{counted}{result}.", row.note if row else ""]))


def _facts(run: MlflowRun, records: Records, history: History) -> list[tuple[str, str]]:
    params, last = run.data.params, {key: points[-1][1] for key, points in history.items()}
    data = next((params[key] for key in DATA_PARAMS if key in params), None)
    digest = run.data.tags.get(DATA_TAG)
    time, tokens, price = _cost_parts(last)
    num_steps = max((step_of(record) for record in records.checkpoints), default=0)
    (field, origin), first = _origin(records), _first_step(records)
    batch = f"batch of step {first}" if first else "first batch"
    rate = f"{_rounded(params['learning_rate'])}, {params.get('lr_schedule')}" if "learning_rate" in params else None
    started = datetime.fromtimestamp(run.info.start_time / 1000, UTC)
    facts = [
        ("method", run.data.tags.get("prefect.flow_name")),
        ("model", params.get("model")),
        ("starts from", f"{origin}, with a new optimizer" if field == "init_from" else origin),
        ("data", f"{data}, {batch} {digest}" if data and digest else data),
        ("learning rate", rate),
        ("LoRA rank", params.get("lora_rank")),
        ("steps", f"{num_steps} ({num_steps - first} in this run)" if first else str(num_steps)),
        ("tokens", tokens),
        ("time", time),
        ("cost", price),
        ("started", f"{started:%Y-%m-%d %H:%M} UTC"),
        ("service", _service(params.get("base_url", ""), run.data.tags.get("tinker.base_url", ""))),
        ("lineage", _lineage(run, records)),
    ]
    return [(name, value) for name, value in facts if value]


def _service(base_url: str, url: str) -> str:
    """Describe a service by its URL; a local engine has no name, because its URL was valid only while it ran.

    >>> _service("", "http://127.0.0.1:33081"), _service("https://tinker.example", "https://tinker.example")
    ('local engine', 'https://tinker.example')
    """
    is_local = base_url == "local" or (not base_url and urlsplit(url).hostname == "127.0.0.1")
    return "local engine" if is_local else url


def _rounded(number: str) -> str:
    """Round a number to four digits; return other text as it is."""
    try:
        return f"{float(number):.4g}"
    except ValueError:
        return number


def _lineage(run: MlflowRun, records: Records) -> str | None:
    """Describe the way from the data to the newest checkpoint and the registered version.

    Returns None if MLflow has no dataset of the run, or if the run has no checkpoint.
    """
    datasets = [entry.dataset for entry in run.inputs.dataset_inputs] if run.inputs else []
    if not datasets or not records.checkpoints:
        return None
    # The digest of data that are no file is that of the first batch.
    first, of_batch = _first_step(records), run.data.tags.get(DATA_TAG)
    batch = f" of the batch of step {first}" if first else ""
    data = ", ".join(
        f"{dataset.name} (digest{batch if dataset.digest == of_batch else ''} {dataset.digest})" for dataset in datasets
    )
    newest = records.checkpoints[0]
    checkpoint = f"checkpoint {newest.name} at step {step_of(newest)}"
    return " → ".join(filter(None, [data, checkpoint, run.data.tags.get(VERSION_TAG)]))


def _origin(records: Records) -> tuple[str, str]:
    """Return the field that names the weights that a run started from, and their name; empty for the base model."""
    parent = records.checkpoints[-1].get("parent", {}) if records.checkpoints else {}
    field = next((name for name in ("resume", "init_from") if name in parent), "")
    return field, f"{parent['run_name']}@{parent['step']}" if "run_name" in parent else parent.get(field, "")


def _first_step(records: Records) -> int:
    """Return the first step of a run; for a fork, the step of the checkpoint that it continues."""
    return step_of(records.checkpoints[-1]) if _origin(records)[0] else 0


def _main_term(history: History) -> str:
    """Return the weighted regularizer with the largest share of the gradient; empty without one.

    Left out are terms with a target, whose weight cannot be set, and names that the history may have in an escaped
    form, which no field of a config matches.
    """
    rows = [
        row
        for row in recent_term_rows(history)[1]
        if row.name != BASE
        and row.weight > 0
        and row.grad_share > 0
        and f"term/{row.name}/multiplier" not in history
        and re.fullmatch(r"\w{1,60}", row.name)
    ]
    return max(rows, key=lambda row: row.grad_share).name if rows else ""


def _commands(
    run_name: str, directory: RunDirectory, records: Records, run: RunData, term: str
) -> list[tuple[str, str]]:
    """Return purpose and text of the commands that a user may need next.

    They start new runs from the config that the run recorded; on S3, `CONFIG` stands for the config file of the run.

    Args:
        term: regularizer to try the run without; may be empty.
    """
    storage, name = storage_option(run_name, directory.location), shlex.quote(run_name)
    final = next((record for record in records.checkpoints if record.final), None)
    if final is None:
        return [("Resume", f"tinker-flows resume {name}{storage}")]
    override = storage.replace(" --storage ", " storage=")
    config = "CONFIG" if "://" in directory.location else shlex.quote(f"{directory.location}/{CONFIG}")
    method = run.tags.get("prefect.flow_name", "")
    start = f"tinker-flows run {method} --config {config} run_name=NEW{override}"
    field, weights = _origin(records)
    origin = f" {field}={shlex.quote(weights)}" if field else ""
    # A config may not set both fields.
    no_resume = " resume=auto" if field == "resume" else ""
    no_init = " init_from=base" if field == "init_from" else ""
    without = f"{start}{origin} objective.regularizers.{term}.weight=0 && tinker-flows report {name} NEW{storage}"
    return [
        *([(f"See what {term} did: train without it and compare", without)] if term else []),
        ("Sample", f'tinker-flows sample {name}@final "PROMPT"{storage}'),
        ("Chat", f"tinker-flows chat {name}@final{storage}"),
        ("Export", f"tinker-flows export {name}@final --adapter exported{storage}"),
        ("Continue with more steps (fork)", f"{start}{no_init} resume={name}@final {_more(final, run.params)}"),
        ("Train on with a new optimizer", f"{start}{no_resume} init_from={name}@final"),
    ]


def _more(final: CheckpointRecord, params: Mapping[str, str]) -> str:
    """Return the overrides that raise the limits at which a run ended.

    Args:
        params: fields of the run's config that differ from their defaults.
    """
    num_steps, num_epochs = params.get("num_steps"), params.get("num_epochs", "1")
    limits = [] if num_steps is None or step_of(final) < int(num_steps) else ["num_steps"]
    if num_steps is None or (final.epoch or 0) >= int(num_epochs):
        limits.append("num_epochs")
    return " ".join(f"{limit}=MORE" for limit in limits or ["num_steps"])
