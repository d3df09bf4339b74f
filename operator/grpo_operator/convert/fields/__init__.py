"""Fields of a GRPOJob that several options decide about, whatever framework they are of."""
