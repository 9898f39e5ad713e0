"""Results of benchmarks per commit, and their comparison."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import history
from benchmarks.rows import Row


def row(name: str, ratios: list[float], unit: str = "ms") -> Row:
    return Row(name, unit, ours=ratios, peer=[1.0] * len(ratios), peer_name="peer")


def saved(folder: Path, commit: str, rows: list[Row], monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(history, "commit", lambda: commit)
    return history.save(rows, folder)


def test_one_file_per_commit_collects_the_rows_of_several_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, "abc", [row("a", [1.0]), row("b", [2.0])], monkeypatch)
    saved(tmp_path, "abc", [row("b", [3.0])], monkeypatch)
    path = saved(tmp_path, "abc, with changes", [row("b", [4.0])], monkeypatch)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["abc-changed.json", "abc.json"]
    assert {name: list(found.ratios) for name, found in history.read(tmp_path / "abc.json").rows.items()} == {
        "a": [1.0],
        "b": [3.0],
    }
    assert history.read(path).commit == "abc, with changes"


def test_only_rows_outside_the_noise_are_worse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = [
        row("time worse", [1.0, 1.2, 1.1]),
        row("time within noise", [1.0, 1.2, 1.1]),
        row("time better", [1.0, 1.2]),
        row("rate worse", [2.0, 2.2], "tokens/s"),
        row("rate better", [2.0, 2.2], "tokens/s"),
        row("measured once", [1.0]),
        row("gone", [1.0, 1.0]),
    ]
    after = [
        row("time worse", [1.21, 1.3, 1.4]),
        row("time within noise", [1.19, 1.3, 1.4]),
        row("time better", [0.5, 0.6]),
        row("rate worse", [1.8, 1.9], "tokens/s"),
        row("rate better", [3.0, 3.1], "tokens/s"),
        row("measured once", [9.0]),
    ]
    files = [str(saved(tmp_path, "old", before, monkeypatch)), str(saved(tmp_path, "new", after, monkeypatch))]
    with pytest.raises(SystemExit) as exited:
        history.main(files)
    assert exited.value.code == 1
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == "old -> new: 2 of 6 shared benchmarks became worse"
    assert lines == [
        "rate worse: ratio 2.10 (2.00-2.20) -> 1.85 (1.80-1.90)",
        "time worse: ratio 1.10 (1.00-1.20) -> 1.30 (1.21-1.40)",
    ]
    with pytest.raises(SystemExit) as exited:
        history.main([files[0], files[0]])
    assert exited.value.code == 0


def test_results_of_two_machines_are_not_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = saved(tmp_path, "old", [row("a", [1.0])], monkeypatch)
    monkeypatch.setattr(history, "hardware", lambda: "128 cores")
    after = saved(tmp_path, "new", [row("a", [1.0])], monkeypatch)
    with pytest.raises(SystemExit, match="2"):
        history.main([str(before), str(after)])
