"""Stands in for IPython, whose display module SGLang imports for notebooks alone."""  # noqa: N999

# The real one brings a dozen packages.


def get_ipython() -> None:
    """Return None, as outside a notebook."""
