"""One reconciler for each kind, and what they share in a round."""
