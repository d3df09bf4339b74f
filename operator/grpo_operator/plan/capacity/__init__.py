"""Capacity of the nodes: pod requests, feasibility, admission, topology, unhealthy nodes."""
