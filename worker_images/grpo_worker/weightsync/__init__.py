"""Weight updates. Each package is one process or what the processes share."""
