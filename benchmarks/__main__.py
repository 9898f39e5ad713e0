"""``python -m benchmarks``: what tinker-flows costs, each figure beside a peer's in the same run."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

BENCHMARKS = {
    "step_overhead": "Prefect on the critical path of a training step, against the same functions without it",
    "engine_vs_torch": "a training step on the local engine, against a plain loop of torch and peft",
    "engine_sampling": "64 concurrent samples, and one, against transformers.generate on the same prompts",
    "engine_service": "an almost empty training step through SDK and engine, against its computation in process",
    "engine_tenants": "eight training clients in turns, against one; and the memory of each",
    "flow_vs_cookbook": "the sft flow, against tinker-cookbook's supervised loop on the same engine",
    "distill_vs_cookbook": "the on-policy distillation flow, against tinker-cookbook's loop; only when named",
    "dpo_vs_cookbook": "the dpo flow, against tinker-cookbook's DPO loop, with the losses of both; only when named",
    "objective_terms": "eight terms side by side, and their gradients apart, against one callback and one backward",
    "one_pass": "cycles of the service per step where it runs the whole objective, against two passes",
    "rl_vs_cookbook": "the rl flow in three modes, against tinker-cookbook's RL loop in the same; only when named",
    "rl_learns": "the reward that the rl flow comes to, against tinker-cookbook's RL loop; only when named",
    "rl_load": "memory of 256 groups at once, and how busy the engine is in mode async; only when named",
    "long_run": "memory of the flow and of Prefect's database over 10,000 steps, by granularity; only when named",
    "sweep_overhead": "a hundred short trials in a sweep, against a plain loop; four at once; only when named",
    "up_ready": "`tinker-flows up` until all of it is ready, against a Prefect server alone",
    "objective_cost": "three regularizers and their linearization, against the forward_backward they go with",
}
LONG = {
    "distill_vs_cookbook",
    "dpo_vs_cookbook",
    "long_run",
    "rl_learns",
    "rl_load",
    "rl_vs_cookbook",
    "sweep_overhead",
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmarks named, or all, and print the table of each as soon as it is done."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        epilog="\n".join(f"  {name:20}{what}" for name, what in BENCHMARKS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="which ones; unless given, all that are not long")
    names = parser.parse_args(argv).names or [name for name in BENCHMARKS if name not in LONG]
    if unknown := [name for name in names if name not in BENCHMARKS]:
        parser.error(f"there is no benchmark {unknown[0]!r}; there are {', '.join(BENCHMARKS)}")
    # OpenMP reads it when torch is imported. The engine sets it for itself; its peers get the same.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

    from rich.console import Console

    from benchmarks.machine import describe
    from benchmarks.rows import table

    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    console.print(describe())
    for name in names:
        console.print(table(importlib.import_module(f"benchmarks.{name}").measure()))


if __name__ == "__main__":
    main()
