"""The rollout pool: engine rules and memory."""
