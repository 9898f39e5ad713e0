"""Evaluation during training: held-out NLL and any tinker-cookbook evaluator."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from inspect import signature
from itertools import count, islice
from traceback import walk_tb
from typing import Any, Literal, NamedTuple, Protocol, SupportsFloat, runtime_checkable

import chz
import numpy as np
import tinker
import torch
from tinker_cookbook.eval.evaluators import Evaluator, SamplingClientEvaluator, TrainingClientEvaluator
from tinker_cookbook.supervised.common import compute_mean_nll
from tinker_cookbook.supervised.types import SupervisedDataset
from tinker_cookbook.tokenizer_utils import Tokenizer

from blocks.errors import (
    ConfigError,
    EvaluatorError,
    NotFiniteError,
    PoisonedError,
    ServiceLostError,
    TinkerFlowsError,
    reason,
)
from objectives.batch import Batch
from objectives.labels import find_prompts, number_equal, without_labels
from objectives.losses.cross_entropy import weights_cancel
from tasks.common.builders import NO_RESOURCES, data_errors, import_builder, import_object
from tasks.common.internals.cookbook import count_bytes, text_token_mask
from tasks.common.service_errors import service_errors
from tasks.common.task import retried_task
from tasks.common.tokenizers import TokenizedEvaluator, lock_tokenizers
from tasks.evaluation.grading_metrics import digest_problems
from tasks.training.datums import pack_datums
from tasks.training.held_out import MAX_SCORES, BatchValues, EvaluatedBatch, GradedMetrics
from tasks.training.token_meter import TokenMeter
from tasks.training.tracking.metric_names import is_own, safe_name

OnEvaluatorError = Literal["raise", "skip"]


@runtime_checkable
class ScoringEvaluator(Protocol):
    """Evaluator that returns `GradedMetrics`."""

    @property
    def scored_metrics(self) -> tuple[str, ...]:
        """Names of the metrics with a score for each problem."""
        ...


class HeldOutNLL(TrainingClientEvaluator):
    """Negative log-likelihood of a dataset's trained tokens.

    The trained tokens are those with a positive weight. Metrics:

    - `test/nll`: tinker-cookbook's mean, weighted by the data's weights, in nats. If the weights are normalized per
      example, as by default, this is the mean over examples of an example's mean per token.
    - `test/nll_per_token`: mean over all trained tokens, in nats.
    - `test/bits_per_byte`: total over the trained tokens that are not special, in bits, divided by the UTF-8 bytes of
      their text. It is comparable between models with different tokenizers, and left out if there is no such text.

    Data with K weighted targets per position has `test/nll` alone, the cross-entropy to these targets. Data whose
    positive and negative weights add up to 0 has no `test/nll`.

    Each metric has a score for each datum, for paired comparisons: the datum's own value, weighted by its loss weight,
    tokens or bytes. Datums of one prompt are one independent sample. With more than `MAX_SCORES` datums, each prompt
    has a score, or each of `MAX_SCORES` groups of prompts.
    """

    scored_metrics: tuple[str, ...] = ("test/nll", "test/nll_per_token", "test/bits_per_byte")

    def __init__(self, dataset: SupervisedDataset, tokenizer: Tokenizer) -> None:
        with data_errors("The held-out data"):
            batches = [dataset.get_batch(index) for index in range(len(dataset))]
        self._datums = [without_labels(datum) for batch in batches for datum in batch]
        if not self._datums:
            raise ConfigError(
                "The held-out data has no full batch: add rows, reduce batch_size, or, in a training run, set "
                "eval_every to 0."
            )
        self.num_tokens = sum(datum.model_input.length for datum in self._datums)
        self.num_datums = len(self._datums)
        weights_D = [datum.loss_fn_inputs["weights"].to_torch() for datum in self._datums]
        self.num_untrained = sum(not bool((weights != 0).any()) for weights in weights_D)
        if self._datums[0].loss_fn_inputs["weights"].to_torch().ndim > 1:
            self.scored_metrics = ("test/nll",)  # data with K targets per position
        if any(float(weights.sum()) < 0 for weights in weights_D):  # no mean over samples
            self.scored_metrics = tuple(name for name in self.scored_metrics if name != "test/nll")
        self._tokenizer, self._batches = tokenizer, batches
        self._logprobs_D: list[torch.Tensor] = []

    async def __call__(self, training_client: tinker.TrainingClient) -> GradedMetrics:
        output = await training_client.forward(self._datums, "cross_entropy")
        logprobs_D = [entry["logprobs"] for entry in output.loss_fn_outputs]
        self._logprobs_D = [logprobs.to_torch() for logprobs in logprobs_D]
        return self._metrics(logprobs_D)

    @property
    def evaluated(self) -> list[EvaluatedBatch]:
        """Batches of the dataset with the logprobs of the last evaluation."""
        logprobs_D = iter(self._logprobs_D)
        logprobs_B = [[*islice(logprobs_D, len(batch))] for batch in self._batches]
        packed = zip(self._packed, logprobs_B, strict=True)
        return [EvaluatedBatch(batch, torch.cat(logprobs)) for batch, logprobs in packed if batch is not None]

    @cached_property
    def _packed(self) -> list[Batch | None]:
        """Packed batches; None for one without a trained token, all of whose completions `max_length` has cut off."""
        return [
            pack_datums(batch, self._tokenizer)
            if any(bool((datum.loss_fn_inputs["weights"].to_torch() != 0).any()) for datum in batch)
            else None
            for batch in self._batches
        ]

    async def measure_sampler(self, sampling_client: tinker.SamplingClient) -> GradedMetrics:
        """Return the same metrics for weights that can only be sampled from.

        Raises:
            ConfigError: the data has K targets per position, which a sampler cannot score.
            PoisonedError: the mean is not finite.
        """
        if self._datums[0].loss_fn_inputs["weights"].to_torch().ndim > 1:
            raise ConfigError(
                "The held-out data has several targets per position, which sampler weights cannot score: give the path "
                "of a checkpoint that can be trained."
            )
        inputs_D = [_input_with_last_target(datum) for datum in self._datums]
        logprobs_D = await asyncio.gather(*(sampling_client.compute_logprobs(tokens) for tokens in inputs_D))
        return self._metrics([tinker.TensorData.from_torch(torch.tensor(logprobs[1:])) for logprobs in logprobs_D])

    def _metrics(self, logprobs_D: list[tinker.TensorData]) -> GradedMetrics:
        weights_D = [datum.loss_fn_inputs["weights"] for datum in self._datums]
        has_mean = not weights_cancel(torch.cat([weights.to_torch().flatten() for weights in weights_D]))
        totals = self._totals(logprobs_D, weights_D)
        if not has_mean or "test/nll" not in self.scored_metrics:
            del totals["test/nll"]
        totals = {name: (sums_D, sizes_D) for name, (sums_D, sizes_D) in totals.items() if sum(sizes_D) > 0}
        means = {name: sum(sums_D) / sum(sizes_D) for name, (sums_D, sizes_D) in totals.items()}
        if has_mean:
            # Flat, because with K targets per position both have the shape (T, K).
            flat_D = [_flat(logprobs) for logprobs in logprobs_D], [_flat(weights) for weights in weights_D]
            means["test/nll"] = compute_mean_nll(*flat_D)
        if wrong := [name for name, mean in means.items() if not math.isfinite(mean)]:
            raise PoisonedError(
                f"The held-out data has the {wrong[0]} {means[wrong[0]]}: check its rows and the weights of the model."
            )
        groups = self._prompts_D
        if len(self._datums) > MAX_SCORES:
            num_prompts = max(groups) + 1
            num = min(num_prompts, MAX_SCORES)
            parts_D = [prompt * num // num_prompts for prompt in groups]
            totals = {
                name: (np.bincount(parts_D, sums_D).tolist(), np.bincount(parts_D, sizes_D).tolist())
                for name, (sums_D, sizes_D) in totals.items()
            }
            groups = []
        sizes = {name: sizes for name, (_, sizes) in totals.items()}
        scores = {
            name: [sum_ / size if size else 0.0 for sum_, size in zip(sums, sizes, strict=True)]
            for name, (sums, sizes) in totals.items()
        }
        return GradedMetrics(means, scores, self._digest, sizes, groups)

    def _totals(
        self, logprobs_D: Sequence[tinker.TensorData], weights_D: Sequence[tinker.TensorData]
    ) -> dict[str, tuple[list[float], list[float]]]:
        """Return each metric's sums and sizes by datum; the metric is the ratio of their totals.

        The sums are nats, or bits for `test/bits_per_byte`. The sizes are weights, tokens and bytes.
        """
        nll_D = [-logprobs.to_torch().double().flatten() for logprobs in logprobs_D]
        weight_D = [weights.to_torch().double().flatten() for weights in weights_D]
        totals = {
            "test/nll": (
                [float(nll @ weight) for nll, weight in zip(nll_D, weight_D, strict=True)],
                [float(weight.sum()) for weight in weight_D],
            )
        }
        if weights_D[0].to_torch().ndim > 1:
            return totals
        trained_D = [weight > 0 for weight in weight_D]
        totals["test/nll_per_token"] = (
            [float(nll[trained].sum()) for nll, trained in zip(nll_D, trained_D, strict=True)],
            [float(trained.sum()) for trained in trained_D],
        )
        texts = self._texts_D
        if any(text.num_bytes for text in texts):
            totals["test/bits_per_byte"] = (
                [float(nll[text.counted].sum()) / math.log(2) for nll, text in zip(nll_D, texts, strict=True)],
                [float(text.num_bytes) for text in texts],
            )
        return totals

    @cached_property
    def _prompts_D(self) -> list[int]:
        """Number of each datum's prompt. Data without prompts, or with one prompt, has a number for each datum."""
        weights_D = [datum.loss_fn_inputs["weights"].to_torch() for datum in self._datums]
        prompts_D = find_prompts(self._datums, weights_D).tolist()
        if len(set(prompts_D)) == 1:
            return [*range(len(prompts_D))]
        # The next free numbers for datums whose first target is trained.
        others = count(max(prompts_D) + 1)
        numbers = [
            next(others) if bool((weights[0] != 0).any()) else prompt
            for weights, prompt in zip(weights_D, prompts_D, strict=True)
        ]
        return number_equal(numbers).tolist()

    @cached_property
    def _texts_D(self) -> list[_Text]:
        inputs_D = [datum.loss_fn_inputs for datum in self._datums]
        return [_text(inputs["target_tokens"], inputs["weights"], self._tokenizer) for inputs in inputs_D]

    @cached_property
    def _digest(self) -> str:
        """Digest of the trained tokens and their weights."""
        inputs_D = [datum.loss_fn_inputs for datum in self._datums]
        return digest_problems(f"{inputs['target_tokens'].data} {inputs['weights'].data}" for inputs in inputs_D)


@dataclass(frozen=True, slots=True)
class ConfiguredEvaluator:
    """Evaluator of the config field `evaluators` or `infrequent_evaluators`.

    Attributes:
        evaluator: the evaluator.
        name: its import path and its position in the field, for messages.
        key: its position in the field, for tags.
        on_error: `raise` ends the run if the evaluator fails, `skip` leaves its metrics out. A lost service or a value
            that is not finite is raised in both cases, because a restart or a guard handles it.
        is_infrequent: whether the evaluator is an entry of `infrequent_evaluators`, which have a period of their own.
    """

    evaluator: Evaluator
    name: str
    key: str
    on_error: OnEvaluatorError = "raise"
    is_infrequent: bool = False


# Called before each evaluator; False leaves out this evaluator and all later ones.
Begin = Callable[[Evaluator | ConfiguredEvaluator], bool]


def _begin_all(entry: Evaluator | ConfiguredEvaluator) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """Result of all evaluators.

    Attributes:
        metrics: numbers by the name under which MLflow stores them (`safe_name`).
        texts: metrics that are strings, by such a name.
        scores: scores of the problems by such a name, for metrics with a score for each problem.
        skipped: error message of each skipped evaluator, by its `ConfiguredEvaluator.key`.
    """

    metrics: dict[str, float] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    scores: dict[str, BatchValues] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)


class EvaluatorEntry(Protocol):
    """Entry of the config field `evaluators`."""

    @property
    def builder(self) -> str: ...

    @property
    def params(self) -> dict[str, object]: ...

    @property
    def on_error(self) -> OnEvaluatorError: ...


def build_evaluators(
    entries: Iterable[EvaluatorEntry],
    infrequent: Iterable[EvaluatorEntry] = (),
    resources: Mapping[str, Any] = NO_RESOURCES,
) -> list[ConfiguredEvaluator]:
    """Build the evaluators of the config fields `evaluators` and `infrequent_evaluators`.

    Args:
        resources: open resources of the run for evaluators with matching parameters; see `tasks.common.builders.build`.

    Raises:
        ConfigError: an entry does not build an evaluator.
    """
    fields = {"evaluators": entries, "infrequent_evaluators": infrequent}
    return [
        ConfiguredEvaluator(
            build_evaluator(entry.builder, entry.params, resources),
            f"{entry.builder} ({field}.{index})",
            f"{field}.{index}",
            entry.on_error,
            is_infrequent=field == "infrequent_evaluators",
        )
        for field, entries_of_field in fields.items()
        for index, entry in enumerate(entries_of_field)
    ]


def build_evaluator(
    builder: str, params: Mapping[str, object], resources: Mapping[str, Any] = NO_RESOURCES
) -> Evaluator:
    """Build an evaluator from the import path of its class or builder.

    If calling the builder returns a callable that is no evaluator and needs no argument, as with tinker-cookbook's chz
    classes, the callable is called as well. Resources that the builder takes and `params` leave out come from the run.

    Raises:
        ConfigError: the builder does not exist, fails, or does not build an evaluator.
    """
    lock_tokenizers()
    make: Callable[..., object] = import_object(builder, "evaluators.builder")
    if not chz.is_chz(make):  # tinker-cookbook's other builders of evaluators have no base class
        import_builder(builder, "evaluators.builder", (TrainingClientEvaluator, SamplingClientEvaluator))
    try:
        accepted = _parameters(make)
        evaluator = make(**{**{name: value for name, value in resources.items() if name in accepted}, **params})
        is_evaluator = isinstance(evaluator, TrainingClientEvaluator | SamplingClientEvaluator)
        if callable(evaluator) and not is_evaluator and _needs_no_argument(evaluator):
            evaluator = evaluator()
    except TinkerFlowsError:
        raise
    except (Exception, SystemExit) as error:  # third-party code called with the user's parameters
        raise ConfigError(
            f"The evaluator {builder} could not be built ({type(error).__name__}: {error}): check evaluators.params."
        ) from error
    if not isinstance(evaluator, TrainingClientEvaluator | SamplingClientEvaluator):
        raise ConfigError(
            f"The evaluator builder {builder} returned a {type(evaluator).__name__}: return an object whose class "
            "inherits from tinker-cookbook's TrainingClientEvaluator or SamplingClientEvaluator."
        )
    return evaluator


def _parameters(make: Callable[..., object]) -> Collection[str]:
    try:
        return signature(make).parameters
    except ValueError:  # a builtin type without a signature
        return ()


def _needs_no_argument(function: Callable[..., object]) -> bool:
    try:
        signature(function).bind()
    except TypeError:
        return False
    except ValueError:  # a builtin type without a signature
        return True
    return True


async def _run_sampling_evaluator(
    evaluator: SamplingClientEvaluator,
    sampler: tinker.SamplingClient,
    client: tinker.TrainingClient | tinker.SamplingClient,
) -> dict[str, float]:
    """Run an evaluator on a sampler; `client` provides the tokenizer."""
    if isinstance(evaluator, TokenizedEvaluator):
        return await evaluator.measure(sampler, client.get_tokenizer())
    return await evaluator(sampler)


def _input_with_last_target(datum: tinker.Datum) -> tinker.ModelInput:
    """Input of a datum followed by its last target token."""
    last = int(datum.loss_fn_inputs["target_tokens"].data[-1])
    return datum.model_input.append_int(last)


def _flat(tensor: tinker.TensorData) -> tinker.TensorData:
    return tinker.TensorData.from_torch(tensor.to_torch().flatten())


class _Text(NamedTuple):
    """Trained tokens of a datum that are not special: which tokens they are, and the UTF-8 bytes of their text."""

    counted: torch.Tensor
    num_bytes: int


def _text(tokens: tinker.TensorData, weights: tinker.TensorData, tokenizer: Tokenizer) -> _Text:
    ids = [int(token) for token in tokens.data]
    is_text = text_token_mask(ids, tokenizer)
    counted = [weight > 0 and is_counted for weight, is_counted in zip(weights.data, is_text, strict=True)]
    return _Text(torch.tensor(counted, dtype=torch.bool), count_bytes(ids, counted, tokenizer))


@retried_task(name="evaluate", task_run_name="evaluate-{step}")
async def evaluate(
    client: tinker.TrainingClient,
    evaluators: Sequence[Evaluator | ConfiguredEvaluator],
    step: int,
    meter: TokenMeter,
    begin: Begin = _begin_all,
) -> EvaluationResult:
    """Return the metrics of the weights that step `step` starts from; `meter` counts the tokens of the sampler.

    Args:
        begin: called before each evaluator; if it returns False, this evaluator and all later ones are left out.

    Raises:
        EvaluatorError: an evaluator with `on_error: raise` failed.
        ServiceError: the service failed.
    """
    sampler: tinker.SamplingClient | None = None

    async def run(evaluator: Evaluator) -> Mapping[str, object]:
        nonlocal sampler
        if isinstance(evaluator, TrainingClientEvaluator):
            return await evaluator(client)
        if sampler is None:
            with service_errors("save the weights for sampling"):
                sampler = await client.save_weights_and_get_sampling_client()
            meter.watch(sampler)
        return await _run_sampling_evaluator(evaluator, sampler, client)

    return await _run_all(evaluators, run, begin)


@retried_task(name="evaluate", task_run_name="evaluate-sampler")
async def evaluate_sampler(
    sampler: tinker.SamplingClient,
    evaluators: Sequence[Evaluator | ConfiguredEvaluator],
    begin: Begin = _begin_all,
) -> EvaluationResult:
    """Return the metrics of weights that can only be sampled from.

    Args:
        begin: see `evaluate`.

    Raises:
        ConfigError: an evaluator needs a training client.
        EvaluatorError: an evaluator with `on_error: raise` failed.
        ServiceError: the service failed.
    """
    for entry in evaluators:
        evaluator = entry.evaluator if isinstance(entry, ConfiguredEvaluator) else entry
        if not isinstance(evaluator, HeldOutNLL | SamplingClientEvaluator):
            raise ConfigError(
                f"The evaluator {type(evaluator).__name__} needs a training client, but these weights can only be "
                "sampled from: give the path of a checkpoint that can be trained."
            )

    async def run(evaluator: Evaluator) -> Mapping[str, object]:
        if isinstance(evaluator, HeldOutNLL):
            return await evaluator.measure_sampler(sampler)
        assert isinstance(evaluator, SamplingClientEvaluator)
        return await _run_sampling_evaluator(evaluator, sampler, sampler)

    return await _run_all(evaluators, run, begin)


async def _run_all(
    evaluators: Sequence[Evaluator | ConfiguredEvaluator],
    run: Callable[[Evaluator], Awaitable[Mapping[str, object]]],
    begin: Begin,
) -> EvaluationResult:
    """Run the evaluators one after another; skip a failed one if its `on_error` is `skip`."""
    result = EvaluationResult()
    for entry in evaluators:
        if not begin(entry):
            break
        if isinstance(entry, ConfiguredEvaluator):
            await _run_configured(entry, run, result)
        else:  # held-out data of the run itself
            with service_errors(f"run the evaluator {type(entry).__name__}"):
                _add_metrics(result, await run(entry), type(entry).__name__)
    return result


async def _run_configured(
    entry: ConfiguredEvaluator, run: Callable[[Evaluator], Awaitable[Mapping[str, object]]], result: EvaluationResult
) -> None:
    try:
        try:
            metrics = await run(entry.evaluator)
            _check_new(result, metrics, entry.name)
            _add_metrics(result, metrics, entry.name)
        except TinkerFlowsError:
            raise
        except (Exception, SystemExit) as error:  # third-party code
            if _is_of_the_sdk(error):
                with service_errors(f"run the evaluator {entry.name}"):
                    raise
            raise EvaluatorError(
                f"The evaluator {entry.name} failed ({type(error).__name__}: {reason(error)}): fix it, or set its "
                "on_error to 'skip' to continue without its metrics."
            ) from error
    except (ServiceLostError, NotFiniteError):  # a restart or a guard handles them
        raise
    except TinkerFlowsError as error:
        if entry.on_error == "raise":
            raise
        result.skipped[entry.key] = str(error)


def _is_of_the_sdk(error: BaseException) -> bool:
    """Return whether an error comes from the Tinker SDK and not from the code that uses the SDK."""
    modules = (frame.f_globals.get("__name__", "") for frame, _ in walk_tb(error.__traceback__))
    raised_in_sdk = any(module.partition(".")[0] == "tinker" for module in modules)
    return isinstance(error, tinker.TinkerError) or (isinstance(error, ValueError) and raised_in_sdk)


def _check_new(result: EvaluationResult, metrics: Mapping[str, object], evaluator: str) -> None:
    """Raise an EvaluatorError if an earlier evaluator or the held-out data has returned a metric of the same name."""
    for key in metrics:
        if safe_name(key) in result.metrics or safe_name(key) in result.texts:
            raise EvaluatorError(
                f"The evaluator {evaluator} returned the metric {key!r}, as the held-out data or another evaluator "
                "did: rename it, with the parameter `name` of tinker_flows:ExactMatch and of tinker-cookbook's "
                "SamplerNLLEvaluator."
            )


def _add_metrics(result: EvaluationResult, metrics: Mapping[str, object], evaluator: str) -> None:
    """Add the metrics of an evaluator to a result.

    Raises:
        EvaluatorError: a metric is neither a number nor a string, or its name belongs to the run itself.
    """
    texts = {safe_name(key): value for key, value in metrics.items() if isinstance(value, str)}
    numbers: dict[str, float] = {}
    for key, value in metrics.items():
        if isinstance(value, str):
            continue
        if is_own(key):
            raise EvaluatorError(
                f"The evaluator {evaluator} returned the metric {key!r}, which the run itself logs: rename it, such as "
                f"to 'test/{key}'."
            )
        if not isinstance(value, SupportsFloat):
            raise EvaluatorError(
                f"The evaluator {evaluator} returned a {type(value).__name__} as the metric {key!r}: return a number "
                "or a string."
            )
        numbers[safe_name(key)] = float(value)
    result.metrics.update(numbers)
    result.texts.update(texts)
    if isinstance(metrics, GradedMetrics):
        for key, scores_P in metrics.scores.items():
            sizes = metrics.sizes.get(key) or [1] * len(scores_P)
            result.scores[safe_name(key)] = BatchValues(scores_P, sizes, metrics.problems, [*metrics.groups])
