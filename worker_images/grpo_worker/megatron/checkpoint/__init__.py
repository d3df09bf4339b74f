"""Distributed checkpoints, resharding and in-memory snapshots of a rank."""
