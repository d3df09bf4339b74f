"""A rank copies what it has published beside the checkpoint; training neither waits for it nor fails."""

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_worker.profiling.progress import BACKGROUND, WRITTEN
from grpo_worker.weightsync.protocol.manifest import rank_file
from grpo_worker.weightsync.protocol.stored_version import (
    StoredVersionError,
    manifests_in,
    read_manifest,
    stored_blob,
)
from grpo_worker.weightsync.trainer import version_copy
from grpo_worker.weightsync.trainer.publisher import publish
from grpo_worker.weightsync.trainer.version_copy import VersionCopy

RANK, WORLD = 1, 2


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version_copy, "_STEP", 1000)
    monkeypatch.setattr(version_copy, "_SYNC", 2500)


def published(root: Path, version: int) -> bytes:
    weight = torch.randn(60, 33, generator=torch.Generator().manual_seed(version))
    publish(root, version, RANK, WORLD, [("w", (60, 33), 0, 0, weight)])
    return rank_file(root, version, RANK, "bin").read_bytes()


def test_a_copy_has_the_bytes_and_the_manifest_of_the_publication(tmp_path: Path) -> None:
    root, to = tmp_path / "memory", tmp_path / "weights"
    blob = published(root, 3)
    before = BACKGROUND.amounts().get(WRITTEN, 0)
    VersionCopy(root, 3, RANK, to).run()
    assert BACKGROUND.amounts()[WRITTEN] - before == len(blob), "a slow store is no hang"
    assert stored_blob(to, RANK).read_bytes() == blob
    (file,) = manifests_in(to)
    assert read_manifest(file).to_json() == rank_file(root, 3, RANK, "json").read_text()
    assert len(list(to.iterdir())) == 2


def test_any_flipped_bit_of_a_manifest_is_named(tmp_path: Path) -> None:
    published(tmp_path / "memory", 3)
    VersionCopy(tmp_path / "memory", 3, RANK, tmp_path / "weights").run()
    (file,) = manifests_in(tmp_path / "weights")
    whole = file.read_bytes()
    for place in range(0, len(whole), 7):
        damaged = bytearray(whole)
        damaged[place] ^= 4
        file.write_bytes(damaged)
        with pytest.raises(StoredVersionError, match=rf"{file}: another digest than in its name"):
            read_manifest(file)


@pytest.mark.parametrize("later", [4, 5])
def test_a_copy_that_a_later_version_overtakes_is_no_copy(
    later: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Version 5 takes the memory of version 3; version 4 does not."""
    root, to = tmp_path / "memory", tmp_path / "weights"
    blob = published(root, 3)
    copy = VersionCopy(root, 3, RANK, to)
    original, sent = os.sendfile, list[int]()

    def sendfile(*args: Any) -> int:
        sent.append(original(*args))
        if len(sent) == 3:
            for version in range(4, later + 1):
                copy.before_publishing(version)
                published(root, version)
        return sent[-1]

    monkeypatch.setattr(os, "sendfile", sendfile)
    with caplog.at_level(logging.WARNING):
        copy.run()
    assert len(sent) >= 3, "the later version came in the middle"
    if later == 4:
        assert stored_blob(to, RANK).read_bytes() == blob and len(manifests_in(to)) == 1
    else:
        assert sum(sent) < len(blob) and list(to.iterdir()) == []
        assert "step 3 gets no weights for engines: version 5 was published before" in caplog.text


def test_a_version_that_was_not_published_and_a_store_that_refuses_fail_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    root, to = tmp_path / "memory", tmp_path / "weights"
    with caplog.at_level(logging.WARNING):
        VersionCopy(root, 3, RANK, to).run()
        published(root, 3)

        def full(*_: Any) -> int:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "sendfile", full)
        VersionCopy(root, 3, RANK, to).run()
    assert "No such file" in caplog.text and "No space left" in caplog.text
    assert list(to.iterdir()) == []
