"""Traces, and stacks of a rank that hangs."""
