"""Sampled candidates: completions of the prompts of supervised data, on which scored terms train.

A score has a gradient only where completions of one prompt can be compared. Supervised data has one completion of each
prompt, so the model samples others, and the terms score those. The samples of a step are stored with the run before
the step is trained on: a resumed run trains on the same ones.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import asdict, dataclass
from itertools import islice
from threading import Lock

import tinker
import torch
from tinker import types
from tinker_cookbook.tokenizer_utils import Tokenizer

from blocks.storage import RunDirectory
from blocks.terminal import print_notice
from blocks.tinker_internals import BackcompatSamplingClientFuture
from objectives.batch import Batch, pack, pack_targets, unpack
from objectives.errors import ObjectiveError
from objectives.labels import MEMBER, PROMPT, number_prompts
from objectives.reductions import trained_datums
from tasks.common.sampling import wait_for_snapshot
from tasks.common.service_errors import service_errors
from tasks.common.task import Pending
from tasks.training.batch_source import SampledTokens
from tasks.training.datums import Datums
from tasks.training.held_out import EvaluatedBatch
from tasks.training.token_meter import count_tokens

_PREFIX = "candidates-"


@dataclass(frozen=True, slots=True)
class CandidateSettings:
    """Settings of sampled candidates.

    Attributes:
        num: completions per prompt.
        max_tokens: maximum tokens of a completion; longer ones are truncated.
        every: steps between samplings.
        overlap: True to sample for a step while the step before it is computed, from weights that are one update
            older; the importance weights of the score function account for that.
        seed: seed of the run.
    """

    num: int
    max_tokens: int
    every: int
    overlap: bool
    seed: int


@dataclass(frozen=True, slots=True)
class Completion:
    """Sampled completion.

    Attributes:
        tokens: sampled tokens, including the stop token.
        logprobs: their logprobs under the weights that sampled them, in nats.
        truncated: True if the completion reached `max_tokens`.
        prompt: digest of the prompt's tokens; empty in files of release 0.1.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    truncated: bool
    prompt: str = ""


class CandidateSampler:
    """Sampler of the candidates of a run, with their storage in its directory.

    Attributes:
        settings: number and length of the candidates.
    """

    def __init__(
        self,
        settings: CandidateSettings,
        directory: RunDirectory,
        tokenizer: Tokenizer,
        stop: Callable[[], list[str] | list[int]],
        *,
        data_may_differ: bool = False,
    ) -> None:
        """Prepare to sample.

        Args:
            stop: function that returns the stop sequences; first called when completions are sampled.
            data_may_differ: True if the run may have other data than when candidates were stored: those of other
                prompts are sampled again instead of being an error.
        """
        self.settings, self._directory, self._tokenizer, self._stop = settings, directory, tokenizer, stop
        self._data_may_differ = data_may_differ
        # One thread, so that files are written in the order of the steps, on which `_may_be_stored` relies.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="candidates")
        self._may_be_stored = True  # until a step without stored candidates: later steps have none, either
        self._pending: Pending[Batch] | None = None
        self._sampled: dict[int | None, SampledTokens] = {}  # by step; None for held-out data
        self._lock = Lock()
        self._metrics: dict[int, dict[str, float]] = {}

    def is_due(self, step: int) -> bool:
        """Return whether candidates are sampled for a step."""
        return step % self.settings.every == 0

    def start(self, step: int, supervised: Pending[Batch], client: tinker.TrainingClient) -> Pending[Batch]:
        """Start sampling the candidates of a step from the weights after all updates sent so far.

        If the candidates of the step are stored, as after a restart, the stored ones are used.
        """
        stored = self._read(step) if self._may_be_stored else None
        if stored is not None and self._data_may_differ and (difference := _difference(stored, supervised.result())):
            print_notice(f"{_name(step)} has {difference}; from this step on, candidates are sampled again.")
            self._remove_from(step)
            stored = None
        self._may_be_stored = stored is not None
        snapshot = None if stored is not None else client.save_weights_and_get_sampling_client()
        self._pending = self._thread.submit(copy_context().run, self._batch, step, supervised, stored, snapshot)
        return self._pending

    def sample_held_out(self, held_out: Sequence[Batch], client: tinker.TrainingClient) -> list[EvaluatedBatch]:
        """Sample one completion of each prompt of held-out batches from the current weights.

        The seeds are the same at each evaluation, so that two evaluations differ by their weights alone.
        """
        snapshot = client.save_weights_and_get_sampling_client()
        prompts_B = [prompts_of(batch) for batch in held_out]
        all_prompts = [prompt for prompts in prompts_B for prompt in prompts]

        def sample() -> list[list[Completion]]:
            return self._sample("held-out", all_prompts, 1, wait_for_snapshot(snapshot))

        completions_P = iter(self._thread.submit(copy_context().run, sample).result())
        evaluated: list[EvaluatedBatch] = []
        for batch, prompts in zip(held_out, prompts_B, strict=True):
            completions = [*islice(completions_P, len(prompts))]
            samples = pack_candidates(batch, first_rows(batch), prompts, completions, self._tokenizer)
            assert samples.sampling_logprobs_DT is not None
            evaluated.append(EvaluatedBatch(samples, samples.sampling_logprobs_DT))
        return evaluated

    def wait_until_stored(self) -> None:
        """Wait for the candidates that were started last, so that no checkpoint is recorded without them."""
        if self._pending:
            self._pending.result()

    def take_sampled(self, step: int | None = None) -> SampledTokens:
        """Return the counts of prompt and sampled tokens since the last call.

        Args:
            step: newest step whose candidates count; None for those of all steps.
        """
        with self._lock:
            keys = [key for key in self._sampled if key is None or step is None or key <= step]
            return sum((self._sampled.pop(key) for key in keys), SampledTokens())

    def most_tokens(self, supervised: Batch) -> SampledTokens:
        """Count the tokens of the candidates of a batch's prompts, if all have the maximum length."""
        return most_tokens(prompts_of(supervised), self.settings.num, self.settings.max_tokens)

    def take_metrics(self, step: int) -> dict[str, float]:
        """Return and forget the metrics of a step's candidates; empty for a step without candidates."""
        return self._metrics.pop(step, {})

    def close(self) -> None:
        """Drop sampling that has not started."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _batch(
        self,
        step: int,
        supervised: Pending[Batch],
        stored: list[list[Completion]] | None,
        snapshot: BackcompatSamplingClientFuture | None,
    ) -> Batch:
        batch = supervised.result()
        rows = first_rows(batch)
        prompts = prompts_of(batch)
        if stored is not None and (difference := _difference(stored, batch)):
            raise ObjectiveError(
                f"{_name(step)} has {difference}; restore the data of the run, or delete the file to sample again."
            )
        completions_P = stored
        if snapshot is not None:
            completions_P = self._sample(step, prompts, self.settings.num, wait_for_snapshot(snapshot))
            self._directory.write_bytes(_name(step), _to_json(completions_P))
        assert completions_P is not None
        completions = [completion for group in completions_P for completion in group]
        self._metrics[step] = {
            "candidates/num": float(len(completions)),
            "candidates/tokens_mean": sum(len(c.tokens) for c in completions) / len(completions),
            "candidates/truncated": sum(c.truncated for c in completions) / len(completions),
        }
        return pack_candidates(batch, rows, prompts, completions_P, self._tokenizer)

    def _remove_from(self, step: int) -> None:
        """Remove the stored candidates of a step and of all later ones."""
        for name in self._directory.names():
            if name.startswith(_PREFIX) and name >= _name(step):
                self._directory.remove(name)

    def _sample(
        self, key: int | str, prompts: Sequence[Sequence[int]], num: int, sampler: tinker.SamplingClient
    ) -> list[list[Completion]]:
        """Sample completions of each prompt; the run's seed and `key` determine the seeds."""
        settings, stop = self.settings, self._stop()
        with service_errors("sample candidates"):
            pending = [
                sampler.sample(
                    types.ModelInput.from_ints(list(prompt)),
                    num,
                    types.SamplingParams(
                        max_tokens=settings.max_tokens,
                        temperature=1.0,
                        stop=stop,
                        seed=_seed(settings.seed, key, number),
                    ),
                )
                for number, prompt in enumerate(prompts)
            ]
            responses = [response.result() for response in pending]
        completions_P = [
            [_completion(sequence, prompt) for sequence in response.sequences]
            for prompt, response in zip(prompts, responses, strict=True)
        ]
        counts = (count_tokens(len(prompt), num, response) for prompt, response in zip(prompts, responses, strict=True))
        step = key if isinstance(key, int) else None
        with self._lock:
            self._sampled[step] = sum(counts, self._sampled.get(step, SampledTokens()))
        return completions_P

    def _read(self, step: int) -> list[list[Completion]] | None:
        content = self._directory.read_bytes(_name(step))
        if content is None:
            return None
        try:
            return [
                [
                    Completion(tuple(row["tokens"]), tuple(row["logprobs"]), row["truncated"], row.get("prompt", ""))
                    for row in group
                ]
                for group in json.loads(content)
            ]
        except (ValueError, KeyError, TypeError) as error:
            raise ObjectiveError(
                f"{_name(step)} cannot be read ({type(error).__name__}: {error}); restore the file, or delete it to "
                "sample again."
            ) from error


def pack_candidates(
    supervised: Batch,
    rows: Sequence[int],
    prompts: Sequence[Sequence[int]],
    completions_P: Sequence[Sequence[Completion]],
    tokenizer: Tokenizer,
) -> Batch:
    """Pack completions of prompts into a batch with sampling logprobs; only sampled tokens are trained.

    Args:
        supervised: batch of the prompts; candidates have the labels of its datums.
        rows: datum of each prompt in ``supervised``.
        prompts: tokens of each prompt.
        completions_P: completions of each prompt.
    """
    targets_D: list[torch.Tensor] = []
    masks_D: list[torch.Tensor] = []
    sampling_D: list[torch.Tensor] = []
    datums: list[tinker.Datum] = []
    sources: list[int] = []
    members: list[int] = []
    for row, prompt, completions in zip(rows, prompts, completions_P, strict=True):
        for member, completion in enumerate(completions):
            tokens = [*prompt, *completion.tokens]
            untrained = torch.zeros(len(prompt) - 1)
            targets_D.append(torch.tensor(tokens[1:]))
            masks_D.append(torch.cat([untrained, torch.ones(len(completion.tokens))]))
            sampling_D.append(torch.cat([untrained, torch.tensor(completion.logprobs)]))
            tensors = {"target_tokens": targets_D[-1], "weights": masks_D[-1]}
            inputs = {name: types.TensorData.from_torch(tensor) for name, tensor in tensors.items()}
            datums.append(tinker.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs))
            sources.append(row)
            members.append(member)
    labels_D = {name: label_D[sources] for name, label_D in supervised.labels_D.items()}
    texts_D = {name: tuple(texts[row] for row in sources) for name, texts in supervised.text_labels_D.items()}
    return pack_targets(
        targets_D,
        masks_D,
        tokenizer.decode,
        datums=Datums(datums),
        sampling_logprobs_DT=pack(sampling_D)[0],
        labels_D=labels_D | {PROMPT: torch.tensor(sources), MEMBER: torch.tensor(members)},
        text_labels_D=texts_D,
    )


def most_tokens(prompts: Sequence[Sequence[int]], num: int, max_tokens: int) -> SampledTokens:
    """Count the tokens of `num` candidates of each prompt, if all have the maximum length.

    >>> most_tokens([[5, 6, 7]], num=2, max_tokens=10)
    SampledTokens(num_prefill_tokens=6, num_sample_tokens=20, num_cached_tokens=3, num_scoring_tokens=0)
    """
    num_prompt_tokens = sum(map(len, prompts))
    return SampledTokens(num * num_prompt_tokens, num * max_tokens * len(prompts), (num - 1) * num_prompt_tokens)


def prompts_of(batch: Batch) -> list[list[int]]:
    """Return the tokens of each prompt of a supervised batch, without datums that have no trained token."""
    return [_prompt_tokens(batch, row) for row in first_rows(batch)]


def first_rows(batch: Batch) -> list[int]:
    """Return the index of the first datum with a trained token of each prompt of a batch."""
    first: dict[int, int] = {}
    numbers_D, is_trained_D = number_prompts(batch).tolist(), trained_datums(batch).tolist()
    for row, (number, is_trained) in enumerate(zip(numbers_D, is_trained_D, strict=True)):
        if is_trained:
            first.setdefault(number, row)
    return list(first.values())


def _prompt_tokens(batch: Batch, row: int) -> list[int]:
    """Return the tokens of a datum before its first trained target."""
    datum: tinker.Datum = list(batch.datums)[row]
    mask = unpack(batch.mask_DT, batch.offsets_D)[row]
    try:
        tokens = datum.model_input.to_ints()
    except ValueError as error:
        raise ObjectiveError(
            "Candidates cannot be sampled for a prompt with images; set candidates to 'off', or use data without images"
        ) from error
    return tokens[: int(mask.int().argmax()) + 1]


def _difference(completions_P: Sequence[Sequence[Completion]], batch: Batch) -> str:
    """Return how the prompts of stored completions differ from those of the batch of their step; empty if they do not.

    The prompts of release 0.1, which did not record them, only differ by their number.
    """
    prompts = prompts_of(batch)
    if len(completions_P) != len(prompts):
        return (
            f"completions of {len(completions_P)} prompts, but the batch of this step has {len(prompts)} with a "
            "trained token (earlier releases also counted the others)"
        )
    for completions, prompt in zip(completions_P, prompts, strict=True):
        if any(completion.prompt not in ("", _digest(prompt)) for completion in completions):
            return "completions of other prompts than the batch of this step"
    return ""


def _digest(prompt: Sequence[int]) -> str:
    return hashlib.blake2b(json.dumps(list(prompt)).encode(), digest_size=8).hexdigest()


def _completion(sequence: types.SampledSequence, prompt: Sequence[int]) -> Completion:
    if sequence.logprobs is None:
        raise ObjectiveError("The service returned samples without logprobs; use another service, or candidates 'off'.")
    truncated = sequence.stop_reason == "length"
    return Completion(tuple(sequence.tokens), tuple(sequence.logprobs), truncated, _digest(prompt))


def _seed(seed: int, key: int | str, prompt: int) -> int:
    """Seed of a request of 30 bits, so that the seeds of its samples, this one plus n, stay within 32 bits."""
    return int.from_bytes(hashlib.sha256(f"{(seed, key, prompt)!r}".encode()).digest()[:4], "big") >> 2


def _to_json(completions_P: Sequence[Sequence[Completion]]) -> bytes:
    rows: list[list[Mapping[str, object]]] = [[asdict(completion) for completion in group] for group in completions_P]
    return json.dumps(rows).encode()


def _name(step: int) -> str:
    return f"{_PREFIX}{step:06d}.json"
