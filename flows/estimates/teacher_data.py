"""Estimate of a run on a teacher's data: off-policy and prompt distillation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import tinker

from flows.config.distill import OffPolicyConfig, PromptConfig, TeacherDataConfig
from flows.distill import open_teacher_data, teacher_datasets
from flows.estimates.costs import (
    Bill,
    CostEstimate,
    EvaluatorSizes,
    GroupSizes,
    PriceList,
    earlier_runs,
    estimate_session_of_run,
    measure,
    ranges,
    reference_model,
    schedule_of,
    teacher_model,
)
from flows.runs.blocks import service_url
from flows.training.plan import num_passes
from flows.training.schedule import Schedule
from objectives.objective import Objective
from tasks.distillation.mixture import Item, Mixture
from tasks.distillation.prompts import PromptGroup
from tasks.distillation.teacher_data import TeacherInput, dataset_values, item_key
from tasks.evaluation.evaluators import build_evaluators
from tasks.training.batch_source import SampledTokens
from tasks.training.reference import scored_tokens
from tasks.training.teacher import trained_positions

TeacherDataMethod = OffPolicyConfig | PromptConfig


class ItemSizes(NamedTuple):
    """Sizes of a prompt that the teacher completes, or of a given sequence.

    Attributes:
        student, teacher: Sizes of the teacher's completions with the student's and with the teacher's prompt; empty
            for a given sequence.
        num_prompt_tokens: Tokens of the student's prompt; of a given sequence, the tokens before its first trained one,
            0 if none is trained.
        num_given_tokens: Tokens of a given sequence without its last one; 0 for a prompt.
    """

    student: GroupSizes
    teacher: GroupSizes
    num_prompt_tokens: int
    num_given_tokens: int

    @classmethod
    def of(cls, value: TeacherInput) -> ItemSizes:
        """Measure a prompt or a sequence."""
        if isinstance(value, tinker.Datum):
            positions = trained_positions(value).tolist()
            num_prompt_tokens = positions[0] + 1 if positions else 0
            return cls(GroupSizes(), GroupSizes(), num_prompt_tokens, value.model_input.length)
        student = measure([value])
        teacher = measure([value.for_teacher()]) if isinstance(value, PromptGroup) else student
        return cls(student, teacher, student.num_prompt_tokens // max(student.num_rollouts, 1), 0)

    @property
    def is_trained(self) -> bool:
        """Return whether the run trains on the item; it leaves out given sequences without a trained token."""
        return self.num_prompt_tokens > 0 or not self.num_given_tokens

    @property
    def num_sequences(self) -> int:
        """Number of sequences to train on."""
        return self.student.num_rollouts + (self.num_given_tokens > 0)

    def num_batch_tokens(self, length: int) -> int:
        """Return the tokens of a batch of the sequences if each completion has this length."""
        return self.student.num_batch_tokens(length) + self.num_given_tokens


class DataSizes(NamedTuple):
    """Sizes of a run's data.

    Attributes:
        steps: Keys of the items of each step.
        items: Teacher's model and sizes of each distinct item of the steps.
        held_out: Teacher's model and sizes of each held-out item.
        evaluators: Evaluators of the config.
    """

    steps: Sequence[Sequence[str]]
    items: Mapping[str, tuple[str, ItemSizes]]
    held_out: Sequence[tuple[str, ItemSizes]]
    evaluators: EvaluatorSizes


def estimate_teacher_data(config: TeacherDataMethod) -> CostEstimate:
    """Estimate a run by the cost of an earlier run of the same config and steps, or by the length of completions.

    A teacher completes and scores a prompt once, so the cost is not proportional to the number of steps, and only an
    earlier run with the same number of steps counts.

    Raises:
        ConfigError: The config, the data or the prices are invalid.
        ServiceError: The service does not respond.
    """
    prices = PriceList(config.model, service_url(config.base_url), config.budget.prices)
    datasets = teacher_datasets(config)
    builders = {
        "environment": [dataset.environment for dataset in datasets if dataset.environment],
        "data": [dataset.data for dataset in datasets if dataset.data],
    }
    with estimate_session_of_run(config, builders) as (resources, tokenizer):
        built = [open_teacher_data(tokenizer, resources, dataset, config.seed) for dataset in datasets]
        weights = [dataset.weight for dataset in datasets]
        mixture = Mixture[TeacherInput]([train for train, _ in built], weights, config.batch_size, config.seed)
        schedule = schedule_of(config, len(mixture))
        num_steps = len(schedule.steps)
        earlier = next((run for run in earlier_runs(config, prices) if run.num_steps == num_steps), None)
        if earlier:
            costs, basis = earlier.costs, (earlier.name, earlier.num_steps)
            return CostEstimate(
                config.run_name, config.model, num_steps, costs, costs, *basis, first_step=schedule.first
            )
        entries = build_evaluators(config.evaluators, config.infrequent_evaluators, resources)
        evaluators = EvaluatorSizes.of(entries, tokenizer)
        sizes = _measure(config, datasets, mixture, schedule.steps, [test for _, test in built], evaluators)
    with Objective.from_spec(config.objective) as objective:
        bills = [_count(config, objective, sizes, schedule, Bill(prices), is_high=high) for high in (False, True)]
        excluded = (*_excluded(config, objective), *evaluators.others)
    low, high, parts = ranges(*bills)
    return CostEstimate(
        config.run_name, config.model, num_steps, low, high, parts=parts, excluded=excluded, first_step=schedule.first
    )


def _measure(
    config: TeacherDataMethod,
    datasets: Sequence[TeacherDataConfig],
    mixture: Mixture[TeacherInput],
    step_numbers: range,
    tests: Sequence[Any],
    evaluators: EvaluatorSizes,
) -> DataSizes:
    """Measure the distinct items of all steps, and the held-out items of the datasets."""
    models = [teacher_model(config, dataset.teacher) for dataset in datasets]
    steps = [mixture.at(step) for step in step_numbers]
    distinct: dict[str, Item[TeacherInput]] = {item_key(item): item for items in steps for item in items}
    measured = {key: (models[item.dataset], ItemSizes.of(item.value)) for key, item in distinct.items()}
    items = {key: entry for key, entry in measured.items() if entry[1].is_trained}
    held_out = [
        (model, ItemSizes.of(value))
        for model, test in zip(models, tests, strict=True)
        for value in dataset_values(test)
    ]
    keys = [[item_key(item) for item in items_of_step] for items_of_step in steps]
    return DataSizes(
        [[key for key in keys_of_step if key in items] for keys_of_step in keys], items, held_out, evaluators
    )


def _count(
    config: TeacherDataMethod, objective: Objective, sizes: DataSizes, schedule: Schedule, bill: Bill, *, is_high: bool
) -> Bill:
    """Count the tokens of a run whose completions have one token each or, with `is_high`, the maximum."""
    length = config.rollout.max_tokens if is_high else 1
    bill.add_probe(config, teacher_datasets(config)[0].teacher)
    for model, item in sizes.items.values():
        bill.add("teachers", model, item.teacher.sampling(length))
        if config.top_k:
            _add_scores(bill, "teachers", model, item, length)

    tokens = [sum(sizes.items[key][1].num_batch_tokens(length) for key in keys) for keys in sizes.steps]
    passes = [num_passes(objective, at, config.guards.needs_forward_pass) if is_high else 1 for at in schedule.steps]
    num_train_tokens = sum(count * number for count, number in zip(tokens, passes, strict=True))
    num_train_tokens += sum(
        count for step, count in zip(schedule.steps, tokens, strict=True) if objective.measures_effects(step)
    )
    # A final forward pass over the last batch checks the final weights.
    bill.add_training("training", config.model, num_train_tokens + tokens[-1])

    if objective.needs("ref_logprobs"):
        due = [
            keys
            for step, keys in zip(schedule.steps, sizes.steps, strict=True)
            if objective.needs_at("ref_logprobs", step)
        ]
        items = [sizes.items[key][1] for key in set().union(*due)]
        num_tokens = sum(item.num_batch_tokens(length) for item in items)
        model = reference_model(config)
        if config.top_k:
            bill.add_training("reference", model, num_tokens)
        else:
            num_sequences = sum(item.num_sequences for item in items)
            bill.add("reference", model, scored_tokens(num_tokens, num_sequences))

    num_evaluations = schedule.num_often
    sizes.evaluators.add_to(bill, num_evaluations, schedule.num_rarely, is_high=is_high)
    for model, item in sizes.held_out:
        bill.add("held-out data of the teachers", model, item.teacher.sampling(length))
        _add_scores(bill, "held-out data of the teachers", model, item, length)
        bill.add_training("evaluations", config.model, num_evaluations * item.num_batch_tokens(length))
        if item.student.num_rollouts:
            bill.add("evaluations", config.model, item.student.sampling(length), num_evaluations)
            bill.add("evaluations", model, item.teacher.scoring(length), num_evaluations)
    prompts = [item.num_prompt_tokens for _, item in sizes.held_out[: config.report.num_examples]]
    example_tokens = SampledTokens(sum(prompts), len(prompts) * (config.report.max_tokens if is_high else 1))
    num_times = sum(schedule.evaluates_often_before(at) for at in (schedule.first, schedule.num_steps))
    bill.add("examples of the report", config.model, example_tokens, num_times)
    return bill


def _add_scores(bill: Bill, part: str, model: str, item: ItemSizes, length: int) -> None:
    """Count the teacher's scores of all sequences of an item."""
    if not item.num_given_tokens:
        bill.add(part, model, item.teacher.scoring(length))
    elif item.is_trained:
        bill.add(part, model, scored_tokens(item.num_given_tokens, 1))


def _excluded(config: TeacherDataMethod, objective: Objective) -> Iterator[str]:
    """Yield the costs that the bounds leave out."""
    yield "turns of a rollout after the first, retries, clients of the user's own code"
    if objective.regularizers:
        yield "terms of the objective on held-out data"
    if objective.regularizers and config.candidates != "off":
        yield "sampled candidates of scored terms"
