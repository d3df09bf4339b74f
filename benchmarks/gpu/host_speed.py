"""Speed at which a host starts kernels, to compare the hosts of two measurements."""

import torch
from kernel_models import seconds

_BLOCKS, _WIDTH, _ROUNDS, _WARM_UP = 200, 64, 20, 5


def launch_seconds() -> float:
    """Return the seconds in which the host starts the kernels of a forward and a backward pass.

    The least of some rounds. The matrices are so small that the GPU waits for the host. A block is a product,
    a norm and an activation.
    """
    blocks = [
        layer
        for _ in range(_BLOCKS)
        for layer in (torch.nn.Linear(_WIDTH, _WIDTH), torch.nn.LayerNorm(_WIDTH), torch.nn.GELU())
    ]
    model = torch.nn.Sequential(*blocks).cuda()
    rows = torch.zeros(_WIDTH, _WIDTH, device="cuda")

    def call() -> None:
        model(rows).sum().backward()

    return min([seconds(call) for _ in range(_WARM_UP + _ROUNDS)][_WARM_UP:])
