"""Directories of published models, shrunk in size only, and jobs that train them."""
