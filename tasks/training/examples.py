"""Examples of a run: completions of held-out prompts with their scores, and the parts to which a term objects."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import islice

import torch
from prefect.logging import get_run_logger
from tinker_cookbook.tokenizer_utils import Tokenizer
from torch import Tensor

from blocks.storage import RunDirectory
from objectives.batch import Batch, Outputs, unpack
from objectives.errors import ObjectiveError
from objectives.estimators import ESTIMATORS
from objectives.labels import find_preference_pairs, number_prompts
from objectives.objective import Objective
from objectives.reductions import trained_datums
from objectives.term import Flag, Regularizer, own_params
from tasks.common.jsonl import read_jsonl
from tasks.common.task import call, opaque_argument
from tasks.training.candidates import first_rows
from tasks.training.datums import Datums
from tasks.training.held_out import EvaluatedBatch
from tasks.training.reference import Reference, load_reference
from tasks.training.terms import TaskTermExecutor

EXAMPLES_NAME = "examples.jsonl"


@dataclass(frozen=True, slots=True)
class TermFlag:
    """Part of a completion to which a term objects, ``completion[start:end]``, with the reason."""

    term: str
    start: int
    end: int
    reason: str


@dataclass(frozen=True, slots=True)
class Example:
    """Completion of a held-out prompt with its scores.

    Attributes:
        prompt: text of the prompt.
        completion: text of the sampled completion, or of the chosen completion of a preference pair.
        other: completion in the data, or the rejected completion of a preference pair; empty if there is none. Of
            several completions in the data, the one with the most parts to which terms object.
        other_title: title of `other`.
        scores: value of each term on the completion, and scores of the method: reward, margin or teacher KL.
        flags, other_flags: parts of the completion and of `other` to which terms object.
        unchecked: terms that had nothing to check: their metric `checked` is 0.
    """

    prompt: str
    completion: str
    other: str = ""
    other_title: str = ""
    scores: dict[str, float] = field(default_factory=dict)
    flags: tuple[TermFlag, ...] = ()
    unchecked: tuple[str, ...] = ()
    other_flags: tuple[TermFlag, ...] = ()


@dataclass(frozen=True, slots=True)
class ExampleInput:
    """Datums of an example: one completion, or both completions of a pair.

    Attributes:
        others: completions of the prompt in the data, or the rejected completion of a pair.
    """

    evaluated: EvaluatedBatch
    others: Sequence[str] = ()


def take_values(values_DT: Tensor, offsets_D: Tensor, rows: Sequence[int]) -> Tensor:
    """Return the packed values of some datums."""
    return torch.cat([values_DT[offsets_D[row] : offsets_D[row + 1]] for row in rows])


def take_datums(batch: Batch, rows: Sequence[int]) -> Batch:
    """Return a batch of some datums of another batch, without features."""

    # Fields whose names end in `_DT` have an entry per token; tuples and labels have an entry per datum.
    def taken(name: str, value: object) -> object:
        if isinstance(value, Tensor) and name.endswith("_DT"):
            return take_values(value, batch.offsets_D, rows)
        if isinstance(value, tuple) and value:
            return tuple(value[row] for row in rows)
        if isinstance(value, Mapping):
            return {
                key: item[list(rows)] if isinstance(item, Tensor) else tuple(item[row] for row in rows)
                for key, item in value.items()
            }
        return value

    changed = {item.name: taken(item.name, getattr(batch, item.name)) for item in fields(batch)}
    lengths = torch.tensor([0, *batch.offsets_D.diff()[list(rows)].tolist()])
    changed |= {"offsets_D": lengths.cumsum(0), "features": None}
    if batch.datums is not None:
        datums = list(batch.datums)
        changed["datums"] = Datums([datums[row] for row in rows])
    return replace(batch, **changed)


def first_prompts(evaluated: Sequence[EvaluatedBatch], num: int) -> list[Batch]:
    """Return batches with one datum of each of the first `num` prompts."""
    batches: list[Batch] = []
    for entry in evaluated:
        rows = first_rows(entry.batch)[:num]
        num -= len(rows)
        if rows:
            batches.append(take_datums(entry.batch, rows))
    return batches


def data_completions(evaluated: Sequence[EvaluatedBatch], num: int) -> list[list[str]]:
    """Return the completions in the data of each of the first `num` prompts."""
    completions: list[list[str]] = []
    for entry in evaluated:
        by_prompt: dict[int, list[str]] = {}
        numbers_D, is_trained_D = number_prompts(entry.batch).tolist(), trained_datums(entry.batch).tolist()
        for row in [row for row, is_trained in enumerate(is_trained_D) if is_trained]:
            # Data with several targets per position has no texts.
            by_prompt.setdefault(numbers_D[row], []).extend(entry.batch.texts_D[row : row + 1])
        completions += by_prompt.values()
    return completions[:num]


def example_inputs(evaluated: Sequence[EvaluatedBatch], others: Sequence[Sequence[str]] = ()) -> Iterator[ExampleInput]:
    """Yield the examples of evaluated batches: their first completion of each prompt, or their pairs.

    Args:
        others: completions of the same prompts in the data, in order.
    """
    remaining = iter(others)
    for entry in evaluated:
        is_pair = {"pair", "desirable"} <= entry.batch.labels_D.keys()
        if is_pair:
            chosen_P, rejected_P = find_preference_pairs(entry.batch)
            rows_E = torch.stack([chosen_P, rejected_P], dim=1).tolist()
        else:
            rows_E = [[row] for row in first_rows(entry.batch)]
        for rows in rows_E:
            batch = take_datums(entry.batch, rows)
            logprobs_DT = take_values(entry.logprobs_DT, entry.batch.offsets_D, rows)
            scores_D = tuple(entry.scores_D[row] for row in rows) if entry.scores_D else ()
            texts = batch.texts_D[1:] if is_pair else next(remaining, ())
            yield ExampleInput(EvaluatedBatch(batch, logprobs_DT, scores_D), texts)


def measure_examples(
    inputs: Iterator[ExampleInput],
    num: int,
    objective: Objective,
    executor: TaskTermExecutor,
    reference: Reference | None,
    tokenizer: Tokenizer,
) -> list[Example]:
    """Score the first `num` examples by the terms of an objective, except terms that compare with a reference."""
    entries = list(islice(inputs, num))
    if not entries:
        return []
    terms = [term for term in objective.regularizers if "ref_logprobs" not in term.term.needs]
    batches = [entry.evaluated.batch for entry in entries]
    scores_E = [dict(entry.evaluated.scores_D[0]) if entry.evaluated.scores_D else {} for entry in entries]
    flags_E: list[list[TermFlag]] = [[] for _ in entries]
    unchecked_E: list[list[str]] = [[] for _ in entries]
    data = [
        (Outputs(entry.evaluated.logprobs_DT, None, batch.sampling_logprobs_DT), batch)
        for entry, batch in zip(entries, batches, strict=True)
    ]
    for term in terms:
        try:
            evaluations = executor.measure(term, data)()
        except ObjectiveError as error:
            get_run_logger().warning("The examples have no value of term %s: %s", term.name, error)
            continue
        for evaluation, scores, unchecked in zip(evaluations, scores_E, unchecked_E, strict=True):
            scores[term.name] = evaluation.value
            if evaluation.metrics.get("checked") == 0:
                unchecked.append(term.name)
        for (outputs, batch), flags in zip(data, flags_E, strict=True):
            flags += find_flags(term, outputs, batch, tokenizer)
    is_pairs = batches[0].num_datums == 2
    if objective.base and is_pairs:
        _add_margins(objective.base, entries, scores_E, executor, reference)
    others_E = [_most_flagged(entry.others, terms) for entry in entries]
    return [
        Example(
            _prompt(batch, tokenizer),
            batch.texts_D[0],
            *(other, _title(entry, is_pair=is_pairs)),
            scores,
            tuple(flags),
            tuple(unchecked),
            other_flags,
        )
        for entry, batch, scores, flags, unchecked, (other, other_flags) in zip(
            entries, batches, scores_E, flags_E, unchecked_E, others_E, strict=True
        )
    ]


def find_flags(regularizer: Regularizer, outputs: Outputs, batch: Batch, tokenizer: Tokenizer) -> list[TermFlag]:
    """Return the parts of the first datum's text to which a term objects."""
    if regularizer.term.flag:
        return _text_flags(regularizer, batch.texts_D[0])
    if regularizer.estimator in ESTIMATORS and ESTIMATORS[str(regularizer.estimator)].per_token:
        flags = _token_flags(regularizer, outputs, take_datums(batch, [0]), tokenizer)
        return _named(regularizer, flags)
    return []


def append_examples(directory: RunDirectory, step: int, examples: Sequence[Example]) -> None:
    """Store the examples of the weights before a step with the run."""
    record = {"step": step, "examples": [asdict(example) for example in examples]}
    directory.append_line(EXAMPLES_NAME, json.dumps(record))


def read_examples(directory: RunDirectory) -> dict[int, list[Example]]:
    """Read the stored examples by step; the examples of a repeated evaluation replace the earlier ones of its step."""
    return dict(
        read_jsonl(
            directory,
            EXAMPLES_NAME,
            lambda record: (
                int(record["step"]),
                [
                    Example(
                        **{
                            **entry,
                            "flags": tuple(TermFlag(**flag) for flag in entry["flags"]),
                            # Missing in files of earlier releases:
                            "unchecked": tuple(entry.get("unchecked", ())),
                            "other_flags": tuple(TermFlag(**flag) for flag in entry.get("other_flags", ())),
                        }
                    )
                    for entry in record["examples"]
                ],
            ),
        )
    )


def _text_flags(regularizer: Regularizer, text: str) -> list[TermFlag]:
    """Return the parts of a text to which a term objects; none if the term judges tokens instead of texts."""
    flag = regularizer.term.flag
    return _named(regularizer, flag(text, **own_params(flag, regularizer.params))) if flag else []


def _named(regularizer: Regularizer, flags: Iterable[Flag]) -> list[TermFlag]:
    return [TermFlag(regularizer.name, flag.start, flag.end, flag.reason) for flag in flags]


def _most_flagged(texts: Sequence[str], terms: Sequence[Regularizer]) -> tuple[str, tuple[TermFlag, ...]]:
    """Return the text with the most parts to which terms object, and these parts; empty without texts."""
    flagged = [(text, tuple(flag for term in terms for flag in _text_flags(term, text))) for text in texts]
    return max(flagged, key=lambda pair: len(pair[1]), default=("", ()))


def _title(entry: ExampleInput, *, is_pair: bool) -> str:
    """Title of the completion that an example shows next to its own."""
    if is_pair or not entry.others:
        return "rejected" if is_pair else ""
    return "in the data" if len(entry.others) == 1 else f"in the data, the most marked of {len(entry.others)}"


def _prompt(batch: Batch, tokenizer: Tokenizer) -> str:
    mask = unpack(batch.mask_DT, batch.offsets_D)[0]
    datum = next(iter(batch.datums))
    tokens = [token for chunk in datum.model_input.chunks for token in getattr(chunk, "tokens", ())]
    return str(tokenizer.decode(tokens[: int(mask.int().argmax()) + 1]))


def _add_margins(
    loss: Regularizer,
    pairs: Sequence[ExampleInput],
    scores_E: Sequence[dict[str, float]],
    executor: TaskTermExecutor,
    reference: Reference | None,
) -> None:
    """Add the margin of each pair under a preference loss; the reference's logprobs come from its cache."""
    inputs: list[tuple[Outputs, Batch]] = []
    for pair in pairs:
        batch = pair.evaluated.batch
        reference_DT = call(load_reference, reference, opaque_argument(batch), 0) if reference else None
        inputs.append((Outputs(pair.evaluated.logprobs_DT, reference_DT), batch))
    for evaluation, scores in zip(executor.measure(loss, inputs)(), scores_E, strict=True):
        if "margin" in evaluation.metrics:
            scores["margin"] = evaluation.metrics["margin"]


def _token_flags(regularizer: Regularizer, outputs: Outputs, batch: Batch, tokenizer: Tokenizer) -> list[Flag]:
    """Flags of a term whose scores are per token: consecutive tokens with a positive score."""
    term = regularizer.term
    if inspect.iscoroutinefunction(term.evaluate) or len(batch.texts_D) != 1:
        return []
    features = term.prepare(batch, **own_params(term.prepare, regularizer.params)) if term.prepare else None
    own = Outputs(outputs.logprobs_DT[: batch.num_tokens])
    result = term.evaluate(own, replace(batch, features=features), **own_params(term.evaluate, regularizer.params))
    scores_DT = result[0] if isinstance(result, tuple) else result
    if not isinstance(scores_DT, Tensor) or scores_DT.shape != (batch.num_tokens,):
        return []
    tokens = batch.target_tokens_DT[batch.mask_DT].tolist()
    is_flagged = (scores_DT[batch.mask_DT] > 0).tolist()
    flags: list[Flag] = []
    for index, flagged in enumerate(is_flagged):
        if not flagged:
            continue
        start, end = (len(str(tokenizer.decode(tokens[:length]))) for length in (index, index + 1))
        if flags and flags[-1].end == start:
            flags[-1] = replace(flags[-1], end=end)
        else:
            flags.append(Flag(start, end, "made less likely"))
    return flags
