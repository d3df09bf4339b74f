"""Policy, critic and reward model: forward, backward and step on one rank."""
