"""Commands over several runs."""

from __future__ import annotations

import typer

from deployments.cli.options import ConfigFile, Overrides


def add_to(app: typer.Typer) -> None:
    """Add this file's commands."""
    for command in (sweep,):
        app.command(rich_help_panel="Comparisons")(command)


def sweep(overrides: Overrides = None, config: ConfigFile = None) -> None:
    """Run a flow at many points of a space of configs, and say which were best.

    Example: `tinker-flows sweep --config examples/sweep.yaml concurrency=4`

    Every trial is a run of its own, which `tinker-flows status` lists; the same command again goes on with a sweep that
    was stopped. `python -m flows.sweep --help` lists the fields of its config.
    """
    from flows.command_line import run as run_flow
    from flows.config_file import load_config
    from flows.sweep import show_sweep
    from flows.sweep import sweep as sweep_flow
    from flows.sweeps.config import SweepConfig

    show_sweep(run_flow(sweep_flow, load_config(SweepConfig, config, overrides or [])))
