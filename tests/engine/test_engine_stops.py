"""Stop strings, however tokens cut them."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_jobs import make_job
from transformers import PreTrainedTokenizerFast

from engine.sampling.stops import is_stopped
from engine.tiny import byte_tokenizer

TOKENIZER = byte_tokenizer()
PIECES = ["a", "b", "ab", "é", "\n", "<|im_end|>", "🙂", " "]


def end(tokens: list[int], stops: tuple[str, ...], tokenizer: PreTrainedTokenizerFast = TOKENIZER) -> int | None:
    """How many tokens there are when it stops."""
    job = make_job(0, stop_strings=stops)
    return next((n for n in range(1, len(tokens) + 1) if is_stopped(tokens[:n], job, tokenizer)), None)


@settings(max_examples=200, deadline=None)
@given(
    text=st.lists(st.sampled_from(PIECES), max_size=25).map("".join),
    stops=st.lists(st.lists(st.sampled_from(PIECES), min_size=1, max_size=4).map("".join), max_size=3).map(tuple),
)
def test_the_first_whole_occurrence_stops(text: str, stops: tuple[str, ...]) -> None:
    """The slow twin decodes everything at every token."""
    tokens = TOKENIZER.encode(text)
    expected = next(
        (n for n in range(1, len(tokens) + 1) if any(stop in str(TOKENIZER.decode(tokens[:n])) for stop in stops)), None
    )
    assert end(tokens, stops) == expected


def test_half_a_character_is_no_stop() -> None:
    tokens = TOKENIZER.encode("caf\u00e9!")
    assert end(tokens, ("\u00e9",)) == len(tokens) - 1
    assert end(tokens[:-2], ("\u00e9",)) is None


def test_stop_tokens_stop_at_themselves() -> None:
    job = make_job(0, stop_tokens=frozenset({98}))
    assert is_stopped([97, 98], job, TOKENIZER)
    assert not is_stopped([98, 97], job, TOKENIZER)
