"""Command-line tools that need no cluster."""
