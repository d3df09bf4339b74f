"""Stand-ins for what needs GPUs: engines, their agents, and trainer ranks."""
