"""Estimate of a run before it starts: steps, tokens, passes, cost, and duration based on an earlier run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

from tinker_cookbook.tokenizer_utils import Tokenizer, get_tokenizer, register_tokenizer

from blocks import TinkerService
from blocks.errors import ConfigError, reason
from flows.config.base import SERVICE_PATH
from flows.config.dpo import START, DpoConfig
from flows.config.train import BASE_MODEL, CandidatesConfig, SftConfig
from flows.dpo import open_pairs, preference_loss
from flows.estimates.costs import EvaluatorSizes, schedule_of
from flows.runs.blocks import lacks_key, open_service, service_url, tracking_of
from flows.runs.pace import Pace, find_pace
from flows.runs.prices import Price, price_of
from flows.runs.run import open_builder_arguments
from flows.runs.teachers import base_model_of
from flows.sft import AVAILABLE_INPUTS
from flows.training.guards import reason_to_skip
from flows.training.plan import num_pass_tokens, num_passes
from flows.training.schedule import Schedule
from objectives.batch import Batch
from objectives.objective import Objective
from tasks.common.builders import NO_RESOURCES, takes
from tasks.common.service_errors import service_errors
from tasks.common.task import inline_tasks
from tasks.evaluation.evaluators import HeldOutNLL, build_evaluators
from tasks.preference.pair_source import PairSource
from tasks.supervised.dataset import SupervisedSource, build_dataset
from tasks.training.batch_source import SampledTokens
from tasks.training.candidates import most_tokens, prompts_of
from tasks.training.datums import pack_datums
from tasks.training.reference import scored_tokens
from tasks.training.token_meter import TokenMeter

# Counting the tokens of a batch means tokenizing it; beyond this many batches, the mean is used instead.
_MOST_BATCHES = 1000


@dataclass(frozen=True, slots=True)
class Estimate:
    """Estimate of a whole run.

    Attributes:
        run_name, model: Name and base model of the run.
        num_steps: Number of steps.
        first_step: First step; for a fork, the step of the checkpoint that it continues.
        skipped_steps: Steps whose batches have nothing to train, which `guards.untrained: skip` skips.
        num_tokens: Tokens in the batches of all steps.
        batches_read, batches_of_epoch: Number of batches whose tokens were counted, and number of batches per epoch;
            the tokens of the other trained batches are extrapolated.
        num_forwards: Forward-only passes: one for each step that needs logprobs before its update, one for each
            measured effect, and a final one.
        num_forward_backwards: Passes that compute a gradient.
        num_evaluations: Passes over the held-out data.
        num_held_out_tokens: Tokens in the held-out data.
        candidates: Tokens of sampled candidates, at most, including those of evaluations; zero without candidates.
        examples: Tokens of the examples that the report samples, at most.
        evaluators: Tokens of the evaluators' answers, at most, of all evaluations.
        excluded: What the cost or the duration leaves out: evaluators whose tokens are unknown, or the time of
            evaluations.
        reference: Tokens that the reference model scores; zero without a reference, and for several targets per
            position, for which the reference runs forward passes.
        num_train_tokens: Tokens in all passes of training clients.
        usd: Cost of all these tokens, without storage; None if no price is known. A reference of another base model has
            its own price, or the trained model's price if its own is unknown.
        hours: Duration at the speed of the run `paced_by`; None if there is no such run.
        paced_by: Name of the newest MLflow run of the same model and method; empty if there is no such run.
    """

    run_name: str
    model: str
    num_steps: int
    first_step: int
    skipped_steps: tuple[int, ...]
    num_tokens: int
    batches_read: int
    batches_of_epoch: int
    num_forwards: int
    num_forward_backwards: int
    num_evaluations: int
    num_held_out_tokens: int
    candidates: SampledTokens
    examples: SampledTokens
    evaluators: SampledTokens
    excluded: tuple[str, ...]
    reference: SampledTokens
    num_train_tokens: int
    usd: float | None
    hours: float | None
    paced_by: str


class BatchSize(NamedTuple):
    """Numbers of tokens and datums of a batch."""

    num_tokens: int
    num_datums: int

    @classmethod
    def of(cls, batch: Batch) -> BatchSize:
        return cls(batch.num_tokens, batch.num_datums)


class OpenedData(NamedTuple):
    """Training data, and the sizes of what evaluations read and sample."""

    source: SupervisedSource | PairSource
    held_out: BatchSize
    evaluators: EvaluatorSizes


def estimate(config: SftConfig | DpoConfig) -> Estimate:
    """Estimate a run by counting the tokens of its data; nothing is trained.

    A model of the hosted service is priced without a key too; its tokenizer then comes from the model hub.

    Raises:
        ConfigError: The config, data or prices are invalid; the run itself would raise the same error.
        ServiceError: The service does not respond.
    """
    url = TinkerService().resolved_url if lacks_key(config.model, config.base_url) else service_url(config.base_url)
    price = price_of(config.model, url, config.budget.prices)
    with Objective.from_spec(config.objective) as objective:
        objective.check_needs(AVAILABLE_INPUTS, can_sample=_candidates(config) is not None)
        of_reference = _price_of_reference(config, url) if price and objective.needs("ref_logprobs") else None
        with _open(config, objective) as data:
            return _estimate(config, objective, data, price, of_reference or price)


def _estimate(
    config: SftConfig | DpoConfig,
    objective: Objective,
    data: OpenedData,
    price: Price | None,
    reference_price: Price | None,
) -> Estimate:
    source, held_out = data.source, data.held_out
    schedule = schedule_of(config, source.steps_per_epoch)
    num_steps = len(schedule.steps)
    skipped = tuple(source.untrained_steps(schedule.steps))
    if skipped:
        reason_to_skip(skipped, num_steps, config.guards.untrained)
    trained = sorted(set(schedule.steps) - set(skipped))
    first_batch = source.batch_at(trained[0])
    objective.choose_estimators(first_batch, can_sample=_candidates(config) is not None)
    sizes = _sizes_of_steps(source, schedule, trained)
    tokens = {step: size.num_tokens for step, size in sizes.items()}
    passes = {step: num_passes(objective, step, config.guards.needs_forward_pass) for step in trained}
    has_held_out = held_out.num_tokens > 0
    evaluations = schedule.num_often * has_held_out
    num_held_out_tokens = held_out.num_tokens if evaluations else 0
    num_train_tokens = evaluations * num_held_out_tokens + num_pass_tokens(
        objective, {step: tokens[step] for step in trained}, passes
    )
    reference, num_reference_train_tokens = SampledTokens(), 0
    if objective.needs("ref_logprobs"):
        # The reference model scores each training datum and each held-out datum at most once, not once per epoch.
        due = [sizes[step] for step in trained if objective.needs_at("ref_logprobs", step)]
        whole = list(islice(sizes.values(), schedule.steps_per_epoch))
        scored = [*min(due, whole, key=len), *([held_out] if evaluations else [])]
        num_scored_tokens = sum(size.num_tokens for size in scored)
        has_one_target = first_batch.target_tokens_DT.ndim == 1
        if has_one_target:
            reference = scored_tokens(num_scored_tokens, sum(size.num_datums for size in scored))
        else:
            num_reference_train_tokens = num_scored_tokens
    measured = [step for step in trained if objective.measures_effects(step)]
    of_step, sampled = _candidate_tokens(config, objective, first_batch, trained)
    candidates = of_step.times(len(sampled))
    # Passes over the candidates: forward, forward_backward, and another forward pass where effects are measured.
    num_candidate_passes = 2 * len(sampled) + sum(objective.measures_effects(step) for step in sampled)
    num_train_tokens += num_candidate_passes * (of_step.num_prefill_tokens + of_step.num_sample_tokens)
    candidates += _held_out_candidate_tokens(config, objective, source, evaluations)
    examples = _example_tokens(config, source, schedule) if evaluations else SampledTokens()
    answers = data.evaluators.at_most(schedule.num_often, schedule.num_rarely)
    has_evaluators = has_held_out or bool(config.evaluators or config.infrequent_evaluators)
    pace, num_evaluated_steps = _pace(config), len(schedule.evaluations()) if has_evaluators else 0
    excluded = tuple(data.evaluators.others)
    if pace and pace.omits(num_evaluated_steps):
        excluded = (*excluded, f"the time of evaluations, of which run {pace.run_name} had none")
    usd = None
    if price and reference_price:
        usd = price.of_training(num_train_tokens) + price.of_sampling(candidates + examples + answers)
        usd += reference_price.of_training(num_reference_train_tokens) + reference_price.of_sampling(reference)
    return Estimate(
        run_name=config.run_name,
        model=config.model,
        num_steps=num_steps,
        first_step=schedule.first,
        skipped_steps=skipped,
        num_tokens=sum(tokens.values()),
        batches_read=min(len(trained), schedule.steps_per_epoch, _MOST_BATCHES),
        batches_of_epoch=schedule.steps_per_epoch,
        num_forwards=sum(passes.values()) - len(passes) + len(measured) + 1,
        num_forward_backwards=len(passes),
        num_evaluations=evaluations,
        num_held_out_tokens=num_held_out_tokens,
        candidates=candidates,
        examples=examples,
        evaluators=answers,
        excluded=excluded,
        reference=reference,
        num_train_tokens=num_train_tokens + num_reference_train_tokens,
        usd=usd,
        hours=pace.hours(sum(tokens.values()), num_evaluated_steps) if pace else None,
        paced_by=pace.run_name if pace else "",
    )


@contextmanager
def _open(config: SftConfig | DpoConfig, objective: Objective) -> Iterator[OpenedData]:
    """Open the training data with the service of the run, or without a service if its key is missing."""
    field, data = ("comparisons", config.comparisons) if isinstance(config, DpoConfig) else ("data", config.data)
    if lacks_key(config.model, config.base_url):
        if takes(field, data.builder, data.params, "session"):
            raise ConfigError(
                f"TINKER_API_KEY is missing, and {data.builder} uses the service to make its data: set the key."
            )
        yield _open_data(config, objective, _tokenizer_of_hub(config.model), NO_RESOURCES)
        return
    with open_service(config) as service:
        service.check_model(config.model)
        with service.session() as session, inline_tasks():
            with service_errors(f"create a training client for {config.model}"):
                client = session.create_lora_training_client(config.model, rank=config.lora_rank).result()
            # Builders open the tokenizer by the service's name of the model.
            register_tokenizer(config.model, client.get_tokenizer)
            with open_builder_arguments(config, config.run_name, session, field, data) as arguments:
                yield _open_data(config, objective, client.get_tokenizer(), arguments)


def _tokenizer_of_hub(model: str) -> Tokenizer:
    try:
        return get_tokenizer(model)
    except OSError as error:
        raise ConfigError(
            f"The tokenizer of {model} could not be loaded ({reason(error)}): check the network, or set TINKER_API_KEY."
        ) from error


def _open_data(
    config: SftConfig | DpoConfig, objective: Objective, tokenizer: Tokenizer, resources: Mapping[str, Any]
) -> OpenedData:
    evaluators = _evaluator_sizes(config, tokenizer, resources)
    if isinstance(config, DpoConfig):
        loss = preference_loss(objective)
        pairs, test = open_pairs(config, loss, tokenizer, resources)
        held_out = BatchSize.of(test.batch(range(len(test.comparisons)))) if test else BatchSize(0, 0)
        return OpenedData(pairs, held_out, evaluators)
    source = build_dataset(config.data.builder, config.data.params, tokenizer, config.seed, resources)
    test = HeldOutNLL(source.test, tokenizer) if source.test else None
    held_out = BatchSize(test.num_tokens, test.num_datums) if test else BatchSize(0, 0)
    return OpenedData(source, held_out, evaluators)


def _evaluator_sizes(
    config: SftConfig | DpoConfig, tokenizer: Tokenizer, resources: Mapping[str, Any]
) -> EvaluatorSizes:
    """Measure the evaluators; without a service, the sizes of evaluators that need one are unknown."""
    fields = {"evaluators": config.evaluators, "infrequent_evaluators": config.infrequent_evaluators}
    if "session" in resources:
        run = {**resources, "token_meter": TokenMeter()}
        entries = build_evaluators(config.evaluators, config.infrequent_evaluators, run)
        return EvaluatorSizes.of(entries, tokenizer)
    of_service = {
        f"{entry.builder} ({field}.{index})": entry
        for field, entries in fields.items()
        for index, entry in enumerate(entries)
        if takes(field, entry.builder, entry.params, "session")
    }
    often, rarely = (
        [entry for entry in entries if not any(entry is other for other in of_service.values())]
        for entries in fields.values()
    )
    sizes = EvaluatorSizes.of(build_evaluators(often, rarely), tokenizer)
    return sizes._replace(others=[*sizes.others, *of_service])


def _price_of_reference(config: SftConfig | DpoConfig, url: str) -> Price | None:
    """Return the price of the reference's base model.

    None if the reference is `base` or `start`, if its price is unknown, or if its base model cannot be looked up
    because the key of the service is missing.
    """
    name = config.reference
    if name in (BASE_MODEL, START) or (name.startswith(SERVICE_PATH) and lacks_key(config.model, config.base_url)):
        return None
    if name.startswith(SERVICE_PATH):
        with open_service(config) as service, service.session() as session:
            name = base_model_of(session, name)
    return price_of(name, url, config.budget.prices)


def _candidates(config: SftConfig | DpoConfig) -> CandidatesConfig | None:
    """Return the settings of sampled candidates; None if the method or the config has none."""
    if isinstance(config, DpoConfig) or config.candidates == "off":
        return None
    return CandidatesConfig() if config.candidates == "auto" else config.candidates


def _candidate_tokens(
    config: SftConfig | DpoConfig, objective: Objective, batch: Batch, trained: Sequence[int]
) -> tuple[SampledTokens, list[int]]:
    """Count the tokens of a step's candidates, if all have the maximum length; return them and the steps with some.

    All batches are assumed to have the prompts of the first.
    """
    settings = _candidates(config)
    steps = [step for step in trained if settings and step % settings.every == 0]
    steps = [step for step in steps if objective.due(step, on_candidates=True)]
    if settings is None or not steps:
        return SampledTokens(), []
    return most_tokens(prompts_of(batch), settings.num, settings.max_tokens), steps


def _held_out_candidate_tokens(
    config: SftConfig | DpoConfig, objective: Objective, source: SupervisedSource | PairSource, num_evaluations: int
) -> SampledTokens:
    """Count the tokens of the completions on which evaluations measure terms, if each has the maximum length."""
    settings = _candidates(config)
    is_sampled = any(term.on_candidates for term in objective.regularizers)
    if settings is None or not is_sampled or not num_evaluations or not isinstance(source, SupervisedSource):
        return SampledTokens()
    assert source.test is not None, "evaluations have held-out data"
    batches = (source.test.get_batch(index) for index in range(len(source.test)))
    prompts = [prompt for batch in batches for prompt in prompts_of(pack_datums(batch, source.tokenizer))]
    return SampledTokens(num_evaluations * sum(map(len, prompts)), num_evaluations * len(prompts) * settings.max_tokens)


def _example_tokens(
    config: SftConfig | DpoConfig, source: SupervisedSource | PairSource, schedule: Schedule
) -> SampledTokens:
    """Count the tokens of the report's examples, if each has the maximum length."""
    if not isinstance(source, SupervisedSource) or source.test is None:
        return SampledTokens()
    times = sum(schedule.evaluates_often_before(step) for step in (schedule.first, schedule.num_steps))
    num, prompts = config.report.num_examples, list[list[int]]()
    for index in range(len(source.test)):
        if len(prompts) < num:
            prompts += prompts_of(pack_datums(source.test.get_batch(index), source.tokenizer))
    prompts = prompts[:num]
    return SampledTokens(times * sum(map(len, prompts)), times * len(prompts) * config.report.max_tokens)


def _sizes_of_steps(
    source: SupervisedSource | PairSource, schedule: Schedule, trained: Sequence[int]
) -> Mapping[int, BatchSize]:
    """Return the size of each step's batch, 0 for a skipped step; later epochs repeat the sizes of the first epoch."""
    per_epoch = schedule.steps_per_epoch
    read = trained[: min(per_epoch, _MOST_BATCHES)]
    sizes = {step % per_epoch: BatchSize.of(source.batch_at(step)) for step in read}
    mean = BatchSize(*(round(sum(column) / len(sizes)) for column in zip(*sizes.values(), strict=True)))
    trained_sizes = {step: sizes.get(step % per_epoch, mean) for step in trained}
    return {step: trained_sizes.get(step, BatchSize(0, 0)) for step in schedule.steps}


def _pace(config: SftConfig | DpoConfig) -> Pace | None:
    tracking = tracking_of(config)
    client = tracking.get_client()
    method = "dpo" if isinstance(config, DpoConfig) else "sft"
    with tracking.failures():
        return find_pace(client, tracking.experiment_id(client), config.model, method)
