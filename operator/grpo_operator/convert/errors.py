"""Error of a configuration that cannot be converted."""


class ConvertError(ValueError):
    """A configuration without a GRPOJob that trains the same. The message names option, value and remedy."""
