"""The cached state of the cluster: watches, relists, prerequisites, polled pods."""
