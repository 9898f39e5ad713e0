"""Tasks of a training step, and checkpoints of a run."""
