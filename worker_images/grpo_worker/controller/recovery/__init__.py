"""Restart budget, run record and in-memory checkpoints."""
