"""Utilities that all other packages may use: authentication, errors, files, user functions."""
