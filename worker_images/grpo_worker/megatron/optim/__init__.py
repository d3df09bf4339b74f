"""Optimizer and offload of its state."""
