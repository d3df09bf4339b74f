"""Synchronization of ranks on the host, through the process group's store and beside its collectives."""
