"""Open the samplers of a run: for candidates of training steps, and for examples of the report."""

from __future__ import annotations

from collections.abc import Iterable

from flows.config.distill import TeacherTargetsConfig
from flows.config.loader import renderer_names
from flows.config.train import CandidatesConfig, SftConfig, TrainConfig
from flows.runs.run import Run
from tasks.common.renderers import renderer_name_of
from tasks.common.sampling import open_renderer
from tasks.evaluation.evaluators import HeldOutNLL
from tasks.training.candidates import CandidateSampler, CandidateSettings


def open_candidates(run: Run, config: SftConfig | TeacherTargetsConfig) -> CandidateSampler | None:
    """Open the sampler of candidates; None if the config says `off`.

    Completions end at the stop sequences of the data's renderer or, if the config names no renderer, of the model's
    renderer.
    """
    if config.candidates == "off":
        return None
    candidates = CandidatesConfig() if config.candidates == "auto" else config.candidates
    settings = CandidateSettings(
        candidates.num, candidates.max_tokens, candidates.every, candidates.overlap, config.seed
    )
    return _open(run, config, settings)


def open_examples(run: Run, config: TrainConfig, evaluators: Iterable[object]) -> CandidateSampler | None:
    """Open the sampler of the report's examples; None for no examples, or without supervised held-out data."""
    report = config.report
    if not report.num_examples or not any(isinstance(entry, HeldOutNLL) for entry in evaluators):
        return None
    return _open(run, config, CandidateSettings(1, report.max_tokens, 1, overlap=False, seed=config.seed))


def _open(run: Run, config: TrainConfig, settings: CandidateSettings) -> CandidateSampler:
    tokenizer = run.client.get_tokenizer()

    def stop() -> list[str] | list[int]:
        names = renderer_names(config)
        renderer = open_renderer(names[0] if names else renderer_name_of(config.model, tokenizer), tokenizer)
        return renderer.get_stop_sequences()

    # Before the first checkpoint of its own, a run starts over with the present data.
    starts_over = run.start is None or run.start.has("parent")
    data_may_differ = starts_over or not {"data", "tokenizer"}.isdisjoint(config.accept_changes)
    return CandidateSampler(settings, run.directory, tokenizer, stop, data_may_differ=data_may_differ)
