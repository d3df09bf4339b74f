"""Options of verl."""
