"""Conversion of configurations of verl, slime and NeMo-RL into GRPOJob manifests (pure)."""
