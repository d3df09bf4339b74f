"""Type of the weight version."""

from typing import NewType

# Optimizer steps of the policy: 0 is the initial model, and every step makes the next version. It is called
# ``version`` in code and ``weightVersion`` on the wire.
Version = NewType("Version", int)
