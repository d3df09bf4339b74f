"""Processes: a trainer rank, which publishes or sends versions, and the sidecar, which serves them."""
