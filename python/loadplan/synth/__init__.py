"""Synthetic checkpoints: real names and headers, seeded bytes."""
