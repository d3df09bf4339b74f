"""``kubectl grpo``: a plugin of kubectl for jobs and their pools."""

import os

# Typer imports pydantic, which would look through all installed packages for plugins of its own.
os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "1")
