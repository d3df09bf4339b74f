"""Planner of a job: parallel layout, memory of both pools, transfer bounds."""
