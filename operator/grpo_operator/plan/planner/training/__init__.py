"""Training pool: layout rules, stages, memory, cost, search."""
