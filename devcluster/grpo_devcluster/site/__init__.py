"""The documentation as a web site: ``python -m grpo_devcluster.site`` builds it in ``build/site``."""
