"""When and over which path a weight version reaches the engines."""
