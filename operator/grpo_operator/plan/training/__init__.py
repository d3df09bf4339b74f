"""The training pool: layout rules, stages, memory, choice."""
