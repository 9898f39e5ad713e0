"""Training loop, its schedule, guards and budget."""
