"""Functions that run on several ranks, each in a process of its own, and their launcher."""
