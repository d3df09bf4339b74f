"""Functions that run on ranks: checkpoints that change after they were saved, and the ones before."""

import json
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader

from grpo_worker.checkpointing.store import (
    MARKER,
    DamagedCheckpointError,
    complete_steps,
    directory,
    newest_sound,
    set_aside,
)
from support.ranks.policy_cases import checkpointer, make, train, whole_weights

TENSOR = "optimizer.state.exp_avg.output_layer.weight"


def load_around(root: str, layout: dict[str, int], damage: str) -> dict[str, Any]:
    """Save the steps 1 and 2, damage the newer one, and load as restarts of a job do.

    Returns the messages of damage that this rank has read, the steps of the checkpoints that are left, and
    the step whose weights this rank then has.
    """
    policy = make(layout)
    saver, store = checkpointer(root, policy), Path(root)
    weights = {}
    for step in (1, 2):
        train(policy, range(step, step + 1))
        saver.save(step, {})
        saver.poll(blocking=True)
        weights[step] = whole_weights(policy)
    if dist.get_rank() == 0:
        DAMAGES[damage](directory(store, 1), directory(store, 2))
    dist.barrier()
    messages = list[str]()
    while True:
        dist.barrier()
        path = newest_sound(store, "tiny") if dist.get_rank() == 0 else None
        chosen = [path]
        dist.broadcast_object_list(chosen)
        assert chosen[0] is not None
        try:
            saver.load(chosen[0])
        except DamagedCheckpointError as error:
            messages.append(str(error))
            if dist.get_rank() == 0:
                set_aside(chosen[0], error)  # as the controller does
        else:
            break
    found = whole_weights(policy)
    same = [s for s, kept in weights.items() if all((found[name] == kept[name]).all() for name in kept)]
    return {"messages": messages, "steps": complete_steps(store), "restored": same}


def piece_of(checkpoint: Path, fqn: str = TENSOR) -> tuple[Path, int, int]:
    """Return file, first byte and length of a tensor."""
    places = FileSystemReader(checkpoint).read_metadata().storage_data
    place = next(place for index, place in places.items() if index.fqn == fqn)
    return checkpoint / place.relative_path, place.offset, place.length


def flip_a_byte(checkpoint: Path) -> None:
    """Change a byte in the middle of a tensor's values."""
    file, start, length = piece_of(checkpoint)
    with file.open("r+b") as content:
        content.seek(start + length // 2)
        byte = content.read(1)[0]
        content.seek(-1, 1)
        content.write(bytes([byte ^ 4]))


def _take_older(older: Path, newer: Path) -> None:
    """Put a tensor of the older checkpoint into the newer one: it is sound by itself."""
    source, start, length = piece_of(older)
    target, there, size = piece_of(newer)
    assert size == length
    content = source.read_bytes()[start : start + length]
    with target.open("r+b") as file:
        file.seek(there)
        assert file.read(length) != content, "the step has changed nothing"
        file.seek(there)
        file.write(content)


def _truncate(_older: Path, newer: Path) -> None:
    file, start, length = piece_of(newer)
    with file.open("r+b") as content:
        content.truncate(start + length // 2)


def forget_digests(checkpoint: Path) -> None:
    """Make a checkpoint one of a version that wrote no digests of state files."""
    marker = json.loads((checkpoint / MARKER).read_text())
    gone = [name for name in marker["files"] if name.endswith(".xxh3")]
    assert len(gone) == len(list(checkpoint.glob("*.distcp"))) >= dist.get_world_size()
    for name in gone:
        (checkpoint / name).unlink()
        del marker["files"][name], marker["digests"][name]
    (checkpoint / MARKER).write_text(json.dumps(marker))


def _flip_in_an_old_one(_older: Path, newer: Path) -> None:
    forget_digests(newer)
    flip_a_byte(newer)


DAMAGES = {
    "flipped": lambda _older, newer: flip_a_byte(newer),
    "older": _take_older,
    "truncated": _truncate,
    "old-format": lambda _older, newer: forget_digests(newer),
    "old-format-flipped": _flip_in_an_old_one,
}
