"""Fields of GRPOJob and RolloutPool: one module for each part of a spec."""
