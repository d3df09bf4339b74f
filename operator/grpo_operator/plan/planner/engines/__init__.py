"""Rollout pool: rules and memory of engines."""
