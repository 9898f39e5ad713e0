"""Stop strings and stop tokens."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_jobs import make_job
from tinker.types import ModelInput, SampleRequest, SamplingParams
from transformers import PreTrainedTokenizerFast

from engine.compute.base import BaseModel
from engine.sampling.request import ends_with_stop
from engine.tiny import byte_tokenizer
from engine.wire.sample import decode_job

TOKENIZER = byte_tokenizer()
PIECES = ["a", "b", "ab", "é", "\n", "<|im_end|>", "🙂", " "]


def stop_length(
    tokens: list[int], stops: tuple[str, ...], tokenizer: PreTrainedTokenizerFast = TOKENIZER
) -> int | None:
    """Return the number of tokens up to the stop, or None."""
    job = make_job(0, stop_strings=stops)
    return next((n for n in range(1, len(tokens) + 1) if ends_with_stop(tokens[:n], job, tokenizer)), None)


@settings(max_examples=200, deadline=None)
@given(
    text=st.lists(st.sampled_from(PIECES), max_size=25).map("".join),
    stops=st.lists(st.lists(st.sampled_from(PIECES), min_size=1, max_size=4).map("".join), max_size=3).map(tuple),
)
def test_first_complete_occurrence_stops(text: str, stops: tuple[str, ...]) -> None:
    """The slow reference decodes the whole text at every token."""
    tokens = TOKENIZER.encode(text)
    expected = next(
        (n for n in range(1, len(tokens) + 1) if any(stop in str(TOKENIZER.decode(tokens[:n])) for stop in stops)), None
    )
    assert stop_length(tokens, stops) == expected


def test_partial_character_does_not_stop() -> None:
    tokens = TOKENIZER.encode("caf\u00e9!")
    assert stop_length(tokens, ("\u00e9",)) == len(tokens) - 1
    assert stop_length(tokens[:-2], ("\u00e9",)) is None


def test_stop_strings_do_not_depend_on_the_spaces_that_a_tokenizer_cleans_up() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.clean_up_tokenization_spaces = True
    tokens = tokenizer.encode("Stop , now")
    assert stop_length(tokens, ("p, now",), tokenizer) is None
    assert stop_length(tokens, ("p , now",), tokenizer) == len(tokens)


def test_stop_token_stops() -> None:
    job = make_job(0, stop_tokens=frozenset({98}))
    assert ends_with_stop([97, 98], job, TOKENIZER)
    assert not ends_with_stop([98, 97], job, TOKENIZER)


@pytest.mark.parametrize(
    ("stop", "tokens", "strings"),
    [("", (), ()), ([], (), ()), ([""], (), ()), (["", "ab"], (), ("ab",)), ("ab", (), ("ab",)), ([98], (98,), ())],
)
def test_empty_stop_strings_are_ignored(
    base: BaseModel, stop: str | list[str] | list[int], tokens: tuple[int, ...], strings: tuple[str, ...]
) -> None:
    """Every text contains the empty string, so it would end each completion after one token."""
    request = SampleRequest(prompt=ModelInput.from_ints([97]), sampling_params=SamplingParams(max_tokens=4, stop=stop))
    job = decode_job(request, base.loaded)
    assert (job.stop_tokens, job.stop_strings) == (frozenset(tokens), strings)
