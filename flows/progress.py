"""How far a run is, for whoever watches the terminal or the Prefect UI."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from tqdm import tqdm

from flows.live import Live
from tasks.metrics import MetricsLog


class Progress:
    """A bar with the loss and the time left; it starts at the step the run starts at."""

    def __init__(self, run_name: str, first: int, num_steps: int, log: MetricsLog) -> None:
        self._live = Live(run_name, first, num_steps, log)
        if first:
            tqdm.write(f"Resumed {run_name} at step {first} of {num_steps}.", file=sys.stderr)
        self._bar = tqdm(desc=run_name, initial=first, total=num_steps, unit="step", dynamic_ncols=True, smoothing=0.1)

    def advance(self, metrics: Mapping[str, float]) -> None:
        """One step is done."""
        self._live.advance(metrics)
        shown = {"loss": "loss/total", "base": "loss/base", "nll": "train_mean_nll"}
        # A step that is passed over has none of them.
        figures = {name: f"{metrics[key]:.3f}" for name, key in shown.items() if key in metrics}
        self._bar.set_postfix(figures, refresh=False)
        self._bar.update()

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()
        self._live.__exit__(kind, error, trace)
