"""``python -m benchmarks``: cost of tinker-flows, each figure next to a peer's figure from the same run."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

BENCHMARKS = {
    "step_overhead": "Prefect on the critical path of a training step, against the same functions without Prefect",
    "engine_vs_torch": "a training step on the local engine, against a plain loop of torch and peft",
    "engine_sampling": "64 concurrent samples, and one, against transformers.generate on the same prompts",
    "engine_service": "a one-token training step through SDK and engine, against the same computation in process",
    "engine_tenants": "eight training clients taking turns, against one client; memory per client",
    "flow_vs_cookbook": "the sft flow, against tinker-cookbook's supervised loop on the same engine",
    "distill_vs_cookbook": "the on-policy distillation flow, against tinker-cookbook's loop (long)",
    "dpo_vs_cookbook": "the dpo flow, against tinker-cookbook's DPO loop, with the losses of both (long)",
    "objective_terms": "eight concurrent terms against one callback, separate gradients against one backward",
    "sdk_terms": "eight waiting terms in a loop on the SDK, against the SDK's own custom loss",
    "terms_on_runners": "eight waiting terms on threads, processes, Dask and Ray, against the slowest of them",
    "estimators": "two estimators of scores, against the exact gradient of a toy's expected score and release 0.1",
    "kl_gradients": "bias and spread of the gradients of the KL terms, against the exact gradient on a toy",
    "critic": "baselines of several turns, against the exact advantages and gradient of enumerated games (long)",
    "off_policy": "reward by correction and age of the sampler, against the base loss alone (long)",
    "refill": "reward with refilled groups at equal sampled tokens, against a batch that shrinks (long)",
    "shares": "each term's share of the gradient for 8, 32 and 128 rows, against release 0.1",
    "targets": "values held to targets, against their limits and against runs without targets (long)",
    "effects": "the measured effect of an update on each term, against its gradient by the parameters",
    "demo_control": "the demo without its terms; writes the control that the demo prints beside its result (long)",
    "headline": "effect of a solver in the objective, against cross-entropy and shuffled scores (long, resumable)",
    "one_pass": "service cycles per step with the objective on the service, against two passes",
    "rl_vs_cookbook": "the rl flow in three modes, against tinker-cookbook's RL loop in the same modes (long)",
    "rl_learns": "the final reward of the rl flow, against tinker-cookbook's RL loop (long)",
    "rl_load": "memory with 256 concurrent groups, and engine utilization in mode async (long)",
    "long_run": "memory of the flow and size of Prefect's database over 10,000 steps, by granularity (long)",
    "sweep_overhead": "a hundred short trials in a sweep, against a plain loop; four at once (long)",
    "scale": "load that concurrent runs put on Prefect, MLflow and S3, against a model of one run (long)",
    "up_ready": "startup time of `tinker-flows up`, against a Prefect server alone",
    "objective_cost": "three regularizers and their linearization, against forward_backward of the same batch",
    "digest_cost": "digests of a step's batch, and of a start, against forward_backward of the same batch",
    "balance": "every balancing rule on terms that conflict, against no balancing (long)",
}
LONG = {
    "balance",
    "critic",
    "demo_control",
    "distill_vs_cookbook",
    "dpo_vs_cookbook",
    "headline",
    "long_run",
    "off_policy",
    "refill",
    "rl_learns",
    "rl_load",
    "rl_vs_cookbook",
    "scale",
    "sweep_overhead",
    "targets",
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run benchmarks and print each table when it is complete."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        epilog="\n".join(f"  {name:20}{description}" for name, description in BENCHMARKS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="benchmarks to run; default: all except the long ones")
    parser.add_argument("--save", action="store_true", help="write the ratios to benchmarks/results/<commit>.json")
    options = parser.parse_args(argv)
    names = options.names or [name for name in BENCHMARKS if name not in LONG]
    if unknown := [name for name in names if name not in BENCHMARKS]:
        parser.error(f"unknown benchmark {unknown[0]!r}; use one or more of {', '.join(BENCHMARKS)}")
    # OpenMP reads the variables when torch is imported. The engine sets them too, so all peers have the same settings.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")

    from rich.console import Console
    from rich.table import Table

    from benchmarks import history
    from benchmarks.rows import describe_machine, table

    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    console.print(describe_machine())
    for name in names:
        measured = importlib.import_module(f"benchmarks.{name}").measure()
        console.print(measured if isinstance(measured, Table) else table(measured))
        if options.save and not isinstance(measured, Table):
            console.print(f"saved to {history.save(measured)}")


if __name__ == "__main__":
    main()
