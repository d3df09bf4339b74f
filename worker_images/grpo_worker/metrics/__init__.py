"""Metrics of a step and where they are written."""
