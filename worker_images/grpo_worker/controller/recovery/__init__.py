"""Recovery from failures: restart budget, run record and in-memory checkpoints."""
