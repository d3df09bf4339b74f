"""Options of slime."""
