"""Expected time of one training step (pure)."""
