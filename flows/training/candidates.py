"""Opening of the candidate sampler that a run's config asks for."""

from __future__ import annotations

from flows.config.distill import TeacherTargetsConfig
from flows.config.loader import renderer_names
from flows.config.train import CandidatesConfig, SftConfig
from flows.runs.run import Run
from tasks.common.renderers import renderer_of
from tasks.common.sampling import open_renderer
from tasks.training.candidates import CandidateSampler, CandidateSettings


def open_candidates(run: Run, config: SftConfig | TeacherTargetsConfig) -> CandidateSampler | None:
    """Open the sampler of candidates; None if the config says `off`.

    Completions end where the renderer of the data ends them; without one in the config, the model's renderer.

    Raises:
        ConfigError: The renderer is unknown.
    """
    if config.candidates == "off":
        return None
    chosen = CandidatesConfig() if config.candidates == "auto" else config.candidates
    tokenizer = run.client.get_tokenizer()

    def stop() -> list[str] | list[int]:
        names = renderer_names(config)
        renderer = open_renderer(names[0] if names else renderer_of(config.model, tokenizer), tokenizer)
        return renderer.get_stop_sequences()

    settings = CandidateSettings(chosen.num, chosen.max_tokens, chosen.every, chosen.overlap, config.seed)
    return CandidateSampler(settings, run.directory, tokenizer, stop)
