"""A single-node Kubernetes for the demo and the tests."""
