"""Chaos test, `make chaos`: runs under random kills and network faults must end like a run without faults."""
