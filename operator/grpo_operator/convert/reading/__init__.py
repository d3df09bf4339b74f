"""Options of configurations: shell scripts and YAML files, read without running anything."""
