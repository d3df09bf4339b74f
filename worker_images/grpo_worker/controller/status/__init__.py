"""Progress and its HTTP endpoint."""
