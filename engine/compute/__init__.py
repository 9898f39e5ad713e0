"""Torch: adapters, gradients and optimizers; everything here runs on the compute thread."""
