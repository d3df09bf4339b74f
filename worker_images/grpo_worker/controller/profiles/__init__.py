"""Profiles of a running job: traces of steps, of engines, and stacks of processes."""
