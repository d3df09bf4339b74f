"""Meaning of XIDs, the driver's error codes (pure).

Source: NVIDIA's Xid catalog for Ampere and newer GPUs,
https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html. The classes follow its column
"Resolution Bucket (Immediate Action)".
"""

from typing import NamedTuple

from grpo_operator.api.gpu_messages import Severity

# RESET_GPU, RESTART_BM, WORKFLOW_XID_48, WORKFLOW_NVLINK_ERR: nothing runs well on the GPU before a reset.
_SICK = {
    46: "the GPU stopped processing",
    48: "double-bit ECC error",
    62: "internal micro-controller halt",
    64: "memory remapping failed",
    74: "NVLink error",
    79: "the GPU has fallen off the bus",
    95: "uncontained memory error",
    109: "context switch timeout",
    110: "security fault",
    119: "timeout of a call to the GSP firmware",
    120: "error of the GSP firmware",
    136: "NVLink training failed",
    140: "unrecovered ECC error",
    143: "GPU initialization error",
    158: "fatal GPU timeout",
}
# The GPU goes on. 144 to 150 are fatal or not by bits of the kernel's message, which NVML does not pass on.
_DEGRADED = {
    63: "memory is remapped at the next reset",
    92: "high rate of single-bit ECC errors",
    94: "contained memory error: only the application that met it must restart",
    154: "the driver recommends a recovery action",
    155: "NVLink went down",
    156: "a resource is retired at the next reset",
    157: "a resource could not be retired",
    171: "uncorrectable DRAM error",
    172: "uncorrectable SRAM error",
} | dict.fromkeys(range(144, 151), "NVLink error")
# RESTART_APP with CHECK_APP, and what follows from another XID: not the GPU's fault.
_APPLICATION = frozenset({11, 13, 25, 31, 32, 43, 45, 68, 69, 137})


class Xid(NamedTuple):
    """Meaning of an XID."""

    severity: Severity
    text: str


def meaning(code: int) -> Xid:
    """Return the meaning of an XID. An unknown one is DEGRADED: it moves no pod, but somebody should look."""
    if code in _APPLICATION:
        return Xid(Severity.OK, "error of the application")
    if code in _SICK:
        return Xid(Severity.SICK, _SICK[code])
    return Xid(Severity.DEGRADED, _DEGRADED.get(code, "see NVIDIA's Xid catalog"))
