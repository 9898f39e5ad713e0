"""Datasets for supervised fine-tuning."""
