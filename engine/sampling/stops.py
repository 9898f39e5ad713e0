"""Where a continuation ends before its length does."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from engine.sampling.job import SampleJob

MARGIN = 8  # tokens: a character cut at its first byte, or a space that the tokenizer drops at a text's start


def is_stopped(tokens: list[int], job: SampleJob, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the last of ``tokens`` is a stop token, or completes a stop string.

    A string that the last token completes began no more tokens ago than it has bytes, however it was cut.
    """
    if tokens[-1] in job.stop_tokens:
        return True
    if not job.stop_strings:
        return False
    longest = max(len(stop.encode()) for stop in job.stop_strings)
    text = tokenizer.decode(tokens[-(longest + MARGIN) :])
    assert isinstance(text, str)
    return any(stop in text for stop in job.stop_strings)
