"""Digests of what is in state files of a file system: written with them, sealed by the marker, compared."""

import errno
import json
from pathlib import Path

import pytest
import torch

from grpo_worker.checkpointing import attempts
from grpo_worker.checkpointing.fork import Fork
from grpo_worker.checkpointing.piece_digests import PieceDigests
from grpo_worker.checkpointing.state_writes import write_file
from grpo_worker.checkpointing.store import (
    MARKER,
    DamagedCheckpointError,
    Origin,
    commit,
    directory,
    verify,
)
from support.objects import job, spec_of

MODEL, FILE = "tiny", "__0_0.distcp"
PIECES = [(0, 5), (5, 20)]


def _save(root: Path, step: int = 1, first: bytes = b"first", digests: bool = True) -> Path:
    """Save a checkpoint with a file of two pieces. ``digests``: not as earlier versions did."""
    place = directory(root, step)
    place.mkdir(parents=True)
    written = write_file(place / FILE, [lambda s: s.write(first), lambda s: s.write(bytes(20))])
    assert written == [5, 20]
    if not digests:
        (place / f"{FILE}.xxh3").unlink()
    (place / "controller.json").write_text(json.dumps({"step": step}))
    commit(root, step, Origin(MODEL, ""))
    return place


def _read(place: Path) -> list[bool]:
    """Return of each piece whether it could be compared with a digest."""
    digests, content = PieceDigests.of(place), (place / FILE).read_bytes()
    return [digests.check(FILE, start, length, content[start:][:length]) for start, length in PIECES]


def _flip(file: Path, at: int) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(bytes(content))


def test_pieces_are_those_that_were_written(tmp_path: Path) -> None:
    place = _save(tmp_path)
    assert _read(place) == [True, True]
    marker = json.loads((place / MARKER).read_text())
    assert marker["digests"].keys() == {f"{FILE}.xxh3", "controller.json"}, "one line for each state file"


@pytest.mark.parametrize("at", range(25))
def test_any_flipped_byte_is_named_with_both_digests(tmp_path: Path, at: int) -> None:
    place = _save(tmp_path)
    saved = [digest for _, _, digest in json.loads((place / f"{FILE}.xxh3").read_text())]
    _flip(place / FILE, at)
    with pytest.raises(DamagedCheckpointError) as damaged:
        _read(place)
    piece = int(at >= 5)
    start, length = PIECES[piece]
    message = str(damaged.value)
    assert f"{FILE} was changed after the save, between bytes {start} and {start + length}" in message
    found, expected = message.partition("there is ")[2].split(" was saved")[0].split(", and ")
    assert expected == saved[piece] != found and len(found) == 32


def test_the_file_of_another_step_is_noticed_also_with_its_own_digests(tmp_path: Path) -> None:
    older, newer = _save(tmp_path, 1, b"older"), _save(tmp_path, 2, b"newer")
    (newer / FILE).write_bytes((older / FILE).read_bytes())
    with pytest.raises(DamagedCheckpointError, match=f"{FILE} was changed"):
        _read(newer)
    (newer / f"{FILE}.xxh3").write_bytes((older / f"{FILE}.xxh3").read_bytes())
    with pytest.raises(DamagedCheckpointError, match=rf"{FILE}\.xxh3 was changed after the save: its sha256"):
        _read(newer)


def test_a_piece_that_was_never_written_has_no_digest(tmp_path: Path) -> None:
    place = _save(tmp_path)
    with pytest.raises(DamagedCheckpointError, match="and none was saved"):
        PieceDigests.of(place).check(FILE, 0, 6, b"first\0")


def test_a_truncated_file_and_one_whose_digests_are_gone_are_named(tmp_path: Path) -> None:
    place = _save(tmp_path)
    (place / FILE).write_bytes((place / FILE).read_bytes()[:24])
    with pytest.raises(DamagedCheckpointError, match=rf"{FILE} is missing or not 25 .* \(it has 24\)"):
        verify(place, MODEL)
    with pytest.raises(DamagedCheckpointError, match="of its 19 bytes there"):
        _read(place)
    other = _save(tmp_path, 2)
    (other / f"{FILE}.xxh3").unlink()
    with pytest.raises(DamagedCheckpointError, match=rf"{FILE}\.xxh3 is missing or not .* \(there is none\)"):
        verify(other, MODEL)
    with pytest.raises(DamagedCheckpointError, match=rf"{FILE}\.xxh3 is missing; use an older"):
        _read(other)


def test_a_checkpoint_of_an_earlier_version_has_nothing_to_compare(tmp_path: Path) -> None:
    place = _save(tmp_path, digests=False)
    assert verify(place, MODEL, contents=True).model == MODEL
    assert _read(place) == [False, False]
    marker = json.loads((place / MARKER).read_text())
    del marker["digests"]  # the oldest ones have not even those of small files
    (place / MARKER).write_text(json.dumps(marker))
    assert _read(place) == [False, False]


@pytest.mark.parametrize("digests", [True, False])
def test_a_fork_has_the_digests_of_its_source(tmp_path: Path, digests: bool) -> None:
    source, own = tmp_path / "source", tmp_path / "fork"
    place = _save(source / "checkpoints", digests=digests)
    assert attempts.claim(own, 1, "controller")
    wanted = Fork(spec_of(job(checkpoint={"store": {"path": "/x"}, "resumeFrom": {"job": "source"}})), source)
    assert wanted.adopt(own / "checkpoints", MODEL, 1) == place
    copy = directory(own / "checkpoints", 1, 1)
    assert (copy / FILE).samefile(place / FILE) and _read(copy) == [digests] * 2
    if digests:
        assert (copy / f"{FILE}.xxh3").samefile(place / f"{FILE}.xxh3")
        _flip(place / FILE, 7)
        with pytest.raises(DamagedCheckpointError, match=rf"fork/.*{FILE} was changed"):
            _read(copy)


def test_a_store_without_room_is_named_as_such(tmp_path: Path) -> None:
    (tmp_path / FILE).symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left") as failed:
        write_file(tmp_path / FILE, [lambda stream: torch.save(torch.zeros(1 << 20), stream)])
    assert failed.value.errno == errno.ENOSPC
    assert not (tmp_path / f"{FILE}.xxh3").exists()
