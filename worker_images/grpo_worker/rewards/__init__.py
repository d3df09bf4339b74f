"""Rewards of responses: the task's verifier, built-in and users' functions, and reward servers."""
