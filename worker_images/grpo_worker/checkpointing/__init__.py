"""Checkpoints in the job's store and snapshots in the memory of other nodes."""
