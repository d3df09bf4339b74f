"""Metrics of a step and the places to which they are written."""
