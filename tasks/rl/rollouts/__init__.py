"""Rollout of a group: completers, hooks of users, token limits, progress and the watch for hangs."""
