"""First batch of a run with its loss weights, compared with tinker-cookbook's colors."""

from __future__ import annotations

import html
import io
import re
import unicodedata
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest
import tinker
import torch
from tinker_cookbook.display import colorize_example

from blocks.errors import ConfigError
from objectives.batch import Batch, pack, pack_targets
from objectives.labels import MEMBER, PROMPT
from tasks.reports.first_batch import (
    WeightedDatum,
    first_batch_page,
    first_group,
    print_datums,
    styled_text,
    weighted_datums,
)
from tasks.training.datums import Datums, pack_datums

_ANSI = re.compile(r"\x1b\[(\d+)m(.*?)\x1b\[0m", re.DOTALL)
_COLORS = {"31": "red", "32": "green", "33": "yellow"}


class Letters:
    """Tokenizer of characters, so that the expected text is known; token 0 is an escape character."""

    def decode(self, tokens: list[int]) -> str:
        return "".join("\x1b" if token == 0 else chr(token) for token in tokens)

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [ord(letter) for letter in text]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def datum(text: str, weights: list[float], **fields: Any) -> tinker.Datum:
    tokens = [ord(letter) for letter in text]
    inputs = {"target_tokens": torch.tensor(tokens[1:]), "weights": torch.tensor(weights[1:]), **fields}
    return tinker.Datum(model_input=tinker.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def letters() -> Any:
    return Letters()


def cookbook_colors(example: tinker.Datum, key: str, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    monkeypatch.setenv("FORCE_COLOR", "1")
    text = colorize_example(example, letters(), key)
    assert _ANSI.sub("", text) == ""
    return join([(_COLORS[color], part) for color, part in _ANSI.findall(text)])


def our_colors(text: Any) -> list[tuple[str, str]]:
    return join([(str(span.style), text.plain[span.start : span.end]) for span in text.spans])


def join(parts: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Join neighbors of the same color: the cookbook colors each line of a run on its own."""
    joined: list[tuple[str, str]] = []
    for color, text in parts:
        if joined and joined[-1][0] == color:
            joined[-1] = (color, joined[-1][1] + text)
        else:
            joined.append((color, text))
    return joined


def sampled_batch() -> tuple[Batch, list[tinker.Datum]]:
    """Two rollouts of prompt 0 and one of prompt 1, with the advantages +1, -1 and 0.5."""
    texts, masks = ["q?yes", "q?no!", "r?ok"], [[0, 0, 1, 1, 1], [0, 0, 1, 1, 1], [0, 0, 1, 1]]
    advantages = [1.0, -1.0, 0.5]
    data = [datum(text, [float(flag) for flag in mask]) for text, mask in zip(texts, masks, strict=True)]
    by_token = [torch.tensor(mask[1:]) * advantage for mask, advantage in zip(masks, advantages, strict=True)]
    batch = pack_targets(
        [example.loss_fn_inputs["target_tokens"].to_torch() for example in data],
        [example.loss_fn_inputs["weights"].to_torch() for example in data],
        letters().decode,
        datums=Datums(data),
        advantages_DT=pack(by_token)[0],
        labels_D={PROMPT: torch.tensor([0, 0, 1]), MEMBER: torch.tensor([0, 1, 0])},
    )
    with_advantages = [
        datum(text, [float(flag) for flag in mask], advantages=values)
        for text, mask, values in zip(texts, masks, by_token, strict=True)
    ]
    return batch, with_advantages


def test_datums_with_too_few_targets_are_named() -> None:
    short = datum("abc", [0, 1, 1])
    short = tinker.Datum(model_input=short.model_input.append_int(7), loss_fn_inputs=short.loss_fn_inputs)
    with pytest.raises(ConfigError, match=r"Datum 1 of a batch has 3 input tokens but 2 target_tokens: check that"):
        pack_datums([datum("abc", [0, 1, 1]), short], letters())


def test_colors_are_those_of_tinker_cookbook(monkeypatch: pytest.MonkeyPatch) -> None:
    examples = [datum("ab\ncdef\n", [0, 0, 0, 0.25, 0.25, 0, -0.5, 0.25]), datum("xyz", [0, 0, 1])]
    shown = weighted_datums(pack_datums(examples, letters()), letters())
    for example, weighted in zip(examples, shown, strict=True):
        expected = cookbook_colors(example, "weights", monkeypatch)
        assert our_colors(styled_text(weighted, letters())) == expected
    assert [weighted.title for weighted in shown] == ["example 0", "example 1"]
    assert shown[0].cells() == ("example 0", "8", "4", "-0.5", "0.25")


def test_rollouts_of_the_first_prompt_are_colored_by_their_advantages(monkeypatch: pytest.MonkeyPatch) -> None:
    batch, examples = sampled_batch()
    shown = weighted_datums(batch, letters())
    for example, weighted in zip(examples, shown, strict=True):
        expected = cookbook_colors(example, "advantages", monkeypatch)
        assert our_colors(styled_text(weighted, letters())) == expected
    assert [weighted.title for weighted in first_group(batch, shown)] == ["prompt 0, rollout 0", "prompt 0, rollout 1"]


def test_the_best_and_the_worst_rollout_of_a_prompt_are_printed() -> None:
    batch = replace(
        pack_datums([datum("ab", [0, 1])] * 5, letters()),
        advantages_DT=torch.tensor([0.1, -0.5, 0.4, 0.0, 9.0]),
        labels_D={PROMPT: torch.tensor([0, 0, 0, 0, 1]), MEMBER: torch.tensor([0, 1, 2, 3, 0])},
    )
    printed = first_group(batch, weighted_datums(batch, letters()))
    assert [max(weighted.weights, key=abs) for weighted in printed] == pytest.approx([0.4, -0.5])


def test_two_completions_of_the_first_supervised_prompt_are_printed() -> None:
    texts = ["ab", "ac", "ad", "bc"]  # the first letter is the prompt
    batch = pack_datums([datum(text, [0, 1]) for text in texts], letters())
    shown = first_group(batch, weighted_datums(batch, letters()))
    assert [weighted.title for weighted in shown] == ["example 0", "example 1"]
    other = pack_datums([datum(text, [0, 1]) for text in ("bc", "ab")], letters())
    assert [weighted.title for weighted in first_group(other, weighted_datums(other, letters()))] == ["example 0"]


def test_pairs_show_chosen_and_rejected() -> None:
    pairs = [(4, 1), (4, 0), (7, 1), (7, 0)]
    examples = [
        datum("ab", [0, 1], **{"label:pair": torch.tensor([pair]), "label:desirable": torch.tensor([desirable])})
        for pair, desirable in pairs
    ]
    batch = pack_datums(examples, letters())
    titles = [weighted.title for weighted in first_group(batch, weighted_datums(batch, letters()))]
    assert titles == ["pair 4, chosen", "pair 4, rejected"]


def test_several_targets_count_with_their_sum() -> None:
    targets, weights = torch.tensor([[98, 99], [99, 100]]), torch.tensor([[0.25, 0.5], [0.0, 0.0]])
    inputs = {"target_tokens": targets, "weights": weights}
    example = tinker.Datum(model_input=tinker.ModelInput.from_ints([97, 98]), loss_fn_inputs=inputs)  # pyright: ignore
    (weighted,) = weighted_datums(pack_datums([example], letters()), letters())
    assert list(weighted.weights) == [0.0, 0.75, 0.0]


def test_control_characters_of_the_data_have_no_effect() -> None:
    """Rich drops some C0 codes; terminals also take C1 codes, such as 0x9b, for the start of an escape sequence."""
    codes = [*range(1, 32), *range(0x7F, 0xA0)]
    text = styled_text(WeightedDatum("all", [*codes, 97], [1.0] * (len(codes) + 1)), letters()).plain
    assert not [char for char in text if unicodedata.category(char) == "Cc" and char not in "\n\t"]
    assert "\\x01" in text
    assert "\\x9b" in text
    assert text.endswith("a")


def test_escape_codes_only_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    tokens = [97, 0, 98]  # the data has an escape character
    inputs = {"target_tokens": torch.tensor(tokens[1:]), "weights": torch.tensor([0.0, 1.0])}
    example = tinker.Datum(model_input=tinker.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)  # pyright: ignore
    shown = weighted_datums(pack_datums([example], letters()), letters())
    plain, colored = io.StringIO(), Terminal()
    print_datums("run", shown, letters(), plain)
    print_datums("run", shown, letters(), colored)
    assert plain.getvalue() == (
        "First batch of run: example 0, 1 of 3 tokens trained, each with the loss weight 1\na\\x1bb\n"
    )
    assert "\x1b[32mb" in colored.getvalue()
    assert re.sub(r"\x1b\[[0-9;]*m", "", colored.getvalue()) == plain.getvalue()


class Spans(HTMLParser):
    """Texts of the spans of a page with their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.spans: list[tuple[float, str]] = []
        self._weight: float | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._weight = float(dict(attrs)["title"] or "nan") if tag == "span" else None

    def handle_data(self, data: str) -> None:
        if self._weight is not None:
            self.spans.append((self._weight, data))

    def handle_endtag(self, tag: str) -> None:
        self._weight = None


def test_page_has_every_token_with_its_weight() -> None:
    text = "<b>&\nzz"
    weights = [0, 0.0, 0.5, 0.5, -1, 0.25, 0]
    example = datum(text, [float(weight) for weight in weights])
    page = first_batch_page("my <run>", weighted_datums(pack_datums([example] * 40, letters()), letters()), letters())
    parser = Spans()
    parser.feed(page)
    first = parser.spans[: len(parser.spans) // 32]
    assert "".join(part for _, part in first) == text
    assert [weight for weight, part in first for _ in part] == weights
    assert "The page has the first 32 of 40 datums." in page
    assert html.escape("my <run>") in page
    assert "my <run>" not in page
