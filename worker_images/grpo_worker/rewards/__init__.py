"""Reward functions: built in, verifiers, or the user's own in a process of its own."""
