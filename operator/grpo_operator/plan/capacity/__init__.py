"""Which jobs fit on which nodes: requests, admission, topology, unhealthy nodes."""
