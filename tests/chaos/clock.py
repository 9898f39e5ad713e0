"""Clock of a process that jumps on command, by libfaketime."""

from __future__ import annotations

from pathlib import Path

import libfaketime


def faked_clock(offset: Path) -> dict[str, str]:
    """Return the environment of a process whose clock is off by the seconds in a file, such as `+60`.

    Clocks that cannot be set, such as the monotonic one, run as usual.
    """
    library = Path(libfaketime.__file__).parent / "vendor" / "libfaketime" / "src" / "libfaketime.so.1"
    return {
        "LD_PRELOAD": str(library),
        "FAKETIME_TIMESTAMP_FILE": str(offset),
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "FAKETIME_CACHE_DURATION": "1",  # seconds; without the cache, every reading of any clock opens the file
    }
