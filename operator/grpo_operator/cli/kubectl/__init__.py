"""``kubectl grpo``: a plugin of kubectl for jobs and their pools."""
