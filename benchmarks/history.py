"""Results of the benchmarks per commit: `python -m benchmarks.history [BEFORE AFTER]` names what became worse.

`python -m benchmarks --save` writes the ratios to the peers to `benchmarks/results/<commit>.json`. A ratio became worse
if all of its repetitions after a change are worse than all repetitions before the change. Files of different machines
are not compared, because the peer may not be slower by the same factor.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.rows import Row, commit, hardware, spread

FOLDER = Path(__file__).parent / "results"


@dataclass(frozen=True, slots=True)
class Measured:
    """Ratios of one benchmark row to its peer, one per repetition."""

    unit: str
    ratios: Sequence[float]

    def is_worse_than(self, before: Measured) -> bool:
        """Return whether every repetition is worse than every one before; rates are better if they are higher."""
        if self.unit.endswith(("/s", "per s")):
            return max(self.ratios) < min(before.ratios)
        return min(self.ratios) > max(before.ratios)


@dataclass(frozen=True, slots=True)
class Results:
    """Results of one commit.

    Attributes:
        commit: short hash of the commit, followed by `, with changes` if the tree had any.
        hardware: processor and number of cores.
        saved_at: time of the last measurement, in UTC.
        rows: measurements by the name of their row.
    """

    commit: str
    hardware: str
    saved_at: str
    rows: Mapping[str, Measured]


def save(rows: Sequence[Row], folder: Path = FOLDER) -> Path:
    """Add rows to the file of this commit and return the file; earlier rows of the same names are replaced."""
    path = folder / f"{commit().replace(', with changes', '-changed')}.json"
    measured = dict(read(path).rows) if path.exists() else {}
    measured |= {row.name: Measured(row.unit, [round(ratio, 4) for ratio in row.ratios]) for row in rows}
    results = Results(commit(), hardware(), datetime.now(UTC).isoformat(timespec="seconds"), measured)
    folder.mkdir(exist_ok=True)
    path.write_text(json.dumps(asdict(results), indent=1) + "\n")
    return path


def read(path: Path) -> Results:
    """Read the results of a commit."""
    fields = json.loads(path.read_text())
    return Results(**{**fields, "rows": {name: Measured(**row) for name, row in fields["rows"].items()}})


def compare(before: Results, after: Results) -> list[str]:
    """Return a line for each row that became worse by more than the noise of its repetitions.

    Rows that only one side has, or that were measured only once, are not compared.
    """
    lines = []
    for name in before.rows.keys() & after.rows.keys():
        old, new = before.rows[name], after.rows[name]
        if min(len(old.ratios), len(new.ratios)) > 1 and new.is_worse_than(old):
            lines.append(f"{name}: ratio {spread(old.ratios)} -> {spread(new.ratios)}")
    return sorted(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Compare two files, by default the two newest; exit with 1 if a benchmark became worse."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.history", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="the results before and after a change")
    files = parser.parse_args(argv).files
    if len(files) not in (0, 2):
        parser.error(f"{len(files)} files are given: name two, or none for the two newest in {FOLDER}")
    saved = (read(path) for path in FOLDER.glob("*.json"))
    results = [read(path) for path in files] if files else sorted(saved, key=lambda results: results.saved_at)
    if len(results) < 2:
        parser.error(f"{FOLDER} has the results of fewer than two commits: run `make bench` at both")
    before, after = results[-2:]
    if before.hardware != after.hardware:
        parser.error(f"the results are of two machines, {before.hardware} and {after.hardware}: measure both on one")
    lines = compare(before, after)
    num_shared = len(before.rows.keys() & after.rows.keys())
    print(f"{before.commit} -> {after.commit}: {len(lines)} of {num_shared} shared benchmarks became worse")
    print("\n".join(lines), end="\n" if lines else "")
    sys.exit(1 if lines else 0)


if __name__ == "__main__":
    main()
