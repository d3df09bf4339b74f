"""Parallel layouts, memory and transfer bounds of a job."""
