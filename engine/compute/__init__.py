"""Adapters, gradients and optimizers in torch. Everything here runs on the compute thread."""
