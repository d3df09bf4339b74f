"""Options of NeMo-RL."""
