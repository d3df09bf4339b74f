"""Code that runs in an engine's container beside SGLang: preparation, first process, plugins."""
