"""Versions of what the processes of one job must share, as this process's image has them."""

import ctypes
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cache
from importlib import metadata

_LABELS = {
    "torch": "torch",
    "nccl": "NCCL",
    "ray": "Ray",
    "megatron_core": "Megatron-Core",
    "sglang": "SGLang",
}
_NCCL_WHEELS = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")


@dataclass(frozen=True, slots=True)
class Versions:
    """Versions by library; "" for one that the image does not have, or that is not known."""

    torch: str = ""
    nccl: str = ""
    ray: str = ""
    megatron_core: str = ""
    sglang: str = ""

    def wire(self) -> dict[str, str]:
        """Return the known versions for a message."""
        return {name: version for name, version in asdict(self).items() if version}

    @classmethod
    def of(cls, message: Mapping[str, str]) -> "Versions":
        """Return the versions of a message, without the libraries that this release does not know."""
        return cls(**{field.name: message.get(field.name, "") for field in fields(cls)})


@cache
def installed() -> Versions:
    """Return the versions of this process's image. It imports none of the libraries."""
    return Versions(
        torch=_version("torch"),
        nccl=nccl_version(),
        ray=_version("ray"),
        megatron_core=_version("megatron-core"),
        sglang=_version("sglang"),
    )


@cache
def nccl_version() -> str:
    """Return the version of the NCCL that torch loads.

    That is not always ``torch.cuda.nccl.version()``, which torch was compiled with: some images install
    another NCCL afterwards.
    """
    wheel = next(filter(None, map(_version, _NCCL_WHEELS)), "")
    if wheel:
        return ".".join(re.findall(r"\d+", wheel)[:3])
    try:
        return _nccl_of_code(_nccl_code())
    except (OSError, AttributeError):
        return ""


def _nccl_code() -> int:
    """Return the version of the base's own NCCL as its library says it. Raises OSError if there is none."""
    code = ctypes.c_int()
    ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(code))
    return code.value


def _nccl_of_code(code: int) -> str:
    """Return the version of a number such as 23007, which stands for 2.30.7."""
    return f"{code // 10000}.{code // 100 % 100}.{code % 100}"


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def differences(ours: Versions, theirs: Versions, numbers: Mapping[str, int | None]) -> list[str]:
    """Return, as in "Ray 2.60.0 and 2.61.0", what differs among the libraries of ``numbers``.

    ``numbers``: how many numbers of the version must agree, by library; None: the whole version. A version
    that is not known differs from none.
    """
    found = []
    for name, count in numbers.items():
        mine, other = getattr(ours, name), getattr(theirs, name)
        if mine and other and _first(mine, count) != _first(other, count):
            found.append(f"{_LABELS[name]} {mine} and {other}")
    return found


def _first(version: str, count: int | None) -> object:
    return version if count is None else tuple(re.findall(r"\d+", version)[:count])
