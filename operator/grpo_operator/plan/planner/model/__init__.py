"""Planner's view of a model: shapes, parameter counts, bytes."""
