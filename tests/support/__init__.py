"""Helpers and stand-ins of the tests. No test module imports another."""
