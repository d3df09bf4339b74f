"""A model as the planner sees it: shapes, parameter counts, bytes."""
