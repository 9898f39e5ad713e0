"""Files of objectives, blocks, tasks and flows that one training step executes, for sft and for rl.

    python -m benchmarks.files_per_step

The fewer files a step runs through, the easier it is to read. A file that mostly defines types counts, too, once one of
its functions is called.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from benchmarks.scratch import scratch_home, scratch_prefect_server
from blocks.servers.processes import local_engine
from flows.config.loader import load_config
from flows.config.rl import RlConfig
from flows.config.train import SftConfig
from flows.monitoring.interrupts import StopRequest
from flows.rl import rl
from flows.sft import sft
from flows.training.trainer import Trainer

ROOT = Path(__file__).parents[1]
PACKAGES = ("objectives", "blocks", "tasks", "flows")
CASES = {
    "sft": ("sft", ["objective.regularizers=[]"]),
    "sft-with-three-terms": ("sft", []),
    "rl": ("rl", ["objective.regularizers=[]"]),
    "rl-with-one-term": ("rl", []),
}
STEP = 2  # after the first steps, which trace, open files and fill caches


class Profile:
    """Calls into project files, counted while `active`."""

    def __init__(self) -> None:
        self.active = False
        self.calls: Counter[str] = Counter()

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        if self.active and event == "call":
            path = Path(frame.f_code.co_filename)
            if path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in PACKAGES:
                self.calls[str(path.relative_to(ROOT))] += 1


def profile_step(method: str, overrides: Sequence[str], base_url: str) -> Counter[str]:
    """Run a few steps of a method's example on the tiny model; return the calls of one step by file."""
    profile = Profile()
    step_of_trainer = Trainer._step

    def run_step(self: Trainer, step: int, stop: StopRequest) -> dict[str, float] | None:
        profile.active = step == STEP
        try:
            return step_of_trainer(self, step, stop)
        finally:
            profile.active = False

    run = ["model=tiny", f"base_url={base_url}", f"num_steps={STEP + 2}", "eval_every=0"]
    fields = [*run, *overrides]
    threading.setprofile(profile)
    sys.setprofile(profile)
    Trainer._step = run_step
    try:
        if method == "sft":
            sft(load_config(SftConfig, ROOT / "examples" / "sft.yaml", fields))
        else:
            rl(load_config(RlConfig, ROOT / "examples" / "rl.yaml", [*fields, "transcripts_every=0"]))
    finally:
        Trainer._step = step_of_trainer
        sys.setprofile(None)
        threading.setprofile(None)  # pyright: ignore[reportArgumentType]
    return profile.calls


def main() -> None:
    """Print the files of a step and their number, for each case."""
    with (
        scratch_home(),
        scratch_prefect_server(),
        local_engine(model="tiny", dtype="float32", threads=1) as service,
    ):
        assert service.api_key is not None
        os.environ["TINKER_API_KEY"] = service.api_key.get_secret_value()
        for name, (method, overrides) in CASES.items():
            calls = profile_step(method, [f"run_name={name}", *overrides], service.resolved_url)
            for path, count in sorted(calls.items()):
                print(f"{name}  {count:6}  {path}")
            print(f"{name}: one step executes {len(calls)} project files.")


if __name__ == "__main__":
    main()
