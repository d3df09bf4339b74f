"""Writes far outside of its GPU memory, by which the driver reports XID 31: an error of the application.

    python benchmarks/gpu/page_fault.py

The GPU is fine afterwards; only this process loses it.
"""

import torch
import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def _write_far_away(pointer, distance) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001
    tl.store(pointer + distance, 1.0)


def main() -> None:
    """Fault, and end with CUDA's error."""
    _write_far_away[(1,)](torch.zeros(1, device="cuda"), 1 << 40)
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
