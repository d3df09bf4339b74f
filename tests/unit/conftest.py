"""Settings of all unit tests."""

from hypothesis import settings

# How long an example takes says something of the machine, not of the code.
settings.register_profile("any-machine", deadline=None)
settings.load_profile("any-machine")
