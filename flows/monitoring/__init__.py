"""Events, tags, progress and interrupts of a run."""
