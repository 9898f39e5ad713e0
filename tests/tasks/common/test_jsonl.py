"""JSONL with unusual lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from blocks.errors import ConfigError
from tasks.common.jsonl import read_rows


def write(tmp_path: Path, content: str, encoding: str = "utf-8") -> str:
    path = tmp_path / "rows.jsonl"
    path.write_text(content, encoding=encoding, newline="")
    return str(path)


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85", "\u000b"])
def test_a_string_may_contain_any_line_separator_but_a_line_feed(tmp_path: Path, separator: str) -> None:
    text = f"one{separator}two" if separator != "\u000b" else "one\\u000btwo"
    rows = read_rows(write(tmp_path, f'{{"text": "{text}"}}\n{{"text": "three"}}\n'), ("text",))
    assert [row["text"] for row in rows] == [f"one{separator}two", "three"]


@pytest.mark.parametrize(("encoding", "end"), [("utf-8-sig", "\n"), ("utf-8", "\r\n")])
def test_a_byte_order_mark_and_windows_line_ends_are_read(tmp_path: Path, encoding: str, end: str) -> None:
    rows = read_rows(write(tmp_path, f'{{"text": "one"}}{end}{{"text": "two"}}{end}', encoding), ("text",))
    assert [row["text"] for row in rows] == ["one", "two"]


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("NaN", "NaN is not a value of JSON"),
        ("-Infinity", "-Infinity is not a value of JSON"),
        ("1e999", "1e999 is too large for a number"),
        ('{"a": [-1e999]}', "-1e999 is too large for a number"),
        ('"\\ud800"', r"'\\ud800' is not valid Unicode"),
        ('"a\\uDFFFb"', r"'\\udfff' is not valid Unicode"),
        ("null", "text is null"),
    ],
)
def test_a_text_that_is_no_text_is_named(tmp_path: Path, value: str, problem: str) -> None:
    path = write(tmp_path, f'{{"text": "one"}}\n{{"text": {value}}}\n')
    with pytest.raises(ConfigError, match=rf"^Line 2 of {path} is not a JSON object with text \({problem}\): fix it"):
        read_rows(path, ("text",))


def test_a_pair_of_surrogates_and_a_text_about_them_are_read(tmp_path: Path) -> None:
    rows = read_rows(write(tmp_path, r'{"text": "\ud83d\ude00"}' + "\n" + r'{"text": "\\ud800"}' + "\n"), ("text",))
    assert [row["text"] for row in rows] == ["\U0001f600", r"\ud800"]


def test_a_null_beside_the_required_fields_is_no_text(tmp_path: Path) -> None:
    assert read_rows(write(tmp_path, '{"text": "one", "note": null}\n'), ("text",)) == [{"text": "one"}]


def test_a_deeply_nested_line_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, '{"text": "one"}\n{"text": ' + "[" * 100_000 + "]" * 100_000 + "}\n")
    with pytest.raises(
        ConfigError, match=rf"^Line 2 of {path} is not a JSON object with text \(.*recursion.*\): fix it"
    ):
        read_rows(path, ("text",))
