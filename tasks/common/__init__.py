"""Building blocks that tasks of every method share."""
