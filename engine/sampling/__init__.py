"""Generation of tokens, on the compute thread."""
