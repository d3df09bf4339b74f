"""What runs in an engine's container besides SGLang: preparation, first process, plugins."""
