"""The training pool: layout rules, stages, memory, cost, search."""
