"""Execution of terms in threads, processes and clusters."""
