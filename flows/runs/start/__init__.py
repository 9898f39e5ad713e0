"""Start of a run: under a new or a used name, from its last checkpoint or from other weights, if its records match."""
