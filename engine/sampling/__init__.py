"""Token generation on the compute thread."""
