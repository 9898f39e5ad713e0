"""Rollouts, advantages and batches of reinforcement learning."""
