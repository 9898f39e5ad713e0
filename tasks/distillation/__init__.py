"""Batches of on-policy and off-policy distillation."""
