"""Versions of an image, read without importing the libraries, and their comparison."""

import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata

import pytest

from grpo_worker.common import versions
from grpo_worker.common.versions import Versions, differences, installed, nccl_version


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    nccl_version.cache_clear()
    yield
    nccl_version.cache_clear()


def test_the_versions_are_those_of_the_distributions() -> None:
    found = installed()
    assert found.torch == metadata.version("torch") and found.sglang == metadata.version("sglang")
    assert found.megatron_core == metadata.version("megatron-core")
    assert Versions.of(found.wire()) == found


def test_reading_them_imports_no_library() -> None:
    code = (
        "import sys; from grpo_worker.common.versions import installed; assert installed().torch;"
        "print(sorted({'torch', 'ray', 'sglang', 'megatron'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(("wheel", "version"), [("2.30.7", "2.30.7"), ("2.26.2.post1", "2.26.2")])
def test_the_wheel_of_nccl_counts_where_there_is_one(
    monkeypatch: pytest.MonkeyPatch, wheel: str, version: str
) -> None:
    monkeypatch.setattr(versions, "_version", lambda name: wheel if name == "nvidia-nccl-cu12" else "")
    assert nccl_version() == version


def test_else_the_library_of_the_base_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "_version", lambda _: "")
    monkeypatch.setattr(versions, "_nccl_code", lambda: 22907)
    assert nccl_version() == "2.29.7"


def test_an_image_without_nccl_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> int:
        raise OSError("libnccl.so.2: cannot open shared object file")

    monkeypatch.setattr(versions, "_version", lambda _: "")
    monkeypatch.setattr(versions, "_nccl_code", missing)
    assert nccl_version() == ""


def test_only_the_named_numbers_are_compared() -> None:
    ours, theirs = Versions(torch="2.14.0a0+x", ray="2.60.0"), Versions(torch="2.14.1", ray="2.60.1")
    assert differences(ours, theirs, {"torch": 2}) == []
    assert differences(ours, theirs, {"torch": None, "ray": 3, "nccl": None}) == [
        "torch 2.14.0a0+x and 2.14.1",
        "Ray 2.60.0 and 2.60.1",
    ]
