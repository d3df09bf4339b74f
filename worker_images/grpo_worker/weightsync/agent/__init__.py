"""Process: sidecar of an engine. Fetches versions and installs them in the engine."""
