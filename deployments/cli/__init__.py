"""Subcommands of `tinker-flows`, one module per help panel."""
