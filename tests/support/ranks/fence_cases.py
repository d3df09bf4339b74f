"""Functions that run on ranks: a gang that nobody can stop goes on writing while the next one saves."""

import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from grpo_worker.checkpointing import attempts
from grpo_worker.checkpointing.store import Origin, complete
from grpo_worker.megatron.checkpoint.checkpointer import Checkpointer
from grpo_worker.megatron.training.policy import PolicyModel
from support.ranks.policy_cases import make, train, whole_weights

STEP = 2


def save_beside_an_old_gang(folder: str, layout: dict[str, int]) -> dict[str, Any]:
    """Save a step as attempt 2 while ranks of attempt 1 write theirs of the same step, and want to commit it.

    Returns the two steps after the save and after a restore, whether the weights are the same, the
    controller's state, and on rank 0 why attempt 1 could not commit.
    """
    policy = make(layout)
    old, new = (_gang(folder, policy, attempt) for attempt in (1, 2))
    _claim(folder, 1)
    train(policy, range(1))
    old.save(STEP, {"attempt": 1})
    old._queue.async_calls[0].async_caller.close()  # the ranks have written their files
    _claim(folder, 2)
    train(policy, range(1, 2))
    with _Overwriting(Path(str(old.directory(STEP)))):
        new.save(STEP, {"attempt": 2})
        weights = whole_weights(policy)
        undisturbed = train(policy, range(2, 4))
        old.poll()
        refused = str(old._commits[0].exception(60)) if dist.get_rank() == 0 else ""
        new.poll(blocking=True)
        found = complete(new.root)[STEP]
        new.load(found)
    restored = whole_weights(policy)
    return {
        "undisturbed": undisturbed, "resumed": train(policy, range(2, 4)), "refused": refused,
        "equal": all(torch.equal(weights[name], restored[name]) for name in weights),
        "state": (found / "controller.json").read_text(),
    }  # fmt: skip


def _gang(folder: str, policy: PolicyModel, attempt: int) -> Checkpointer:
    origin = Origin("tiny", str(policy.layout), attempt)
    return Checkpointer(f"{folder}/checkpoints", policy.parts(False), 2, origin)


def _claim(folder: str, attempt: int) -> None:
    """Claim an attempt that starts from the initial state, like the controller."""
    if dist.get_rank() == 0:
        assert attempts.claim(Path(folder), attempt, f"controller-{attempt}")
        attempts.note_restored(Path(folder), attempt, 0)
    dist.barrier()


class _Overwriting:
    """Overwrites this rank's files of a checkpoint again and again, through open handles and by path."""

    def __init__(self, folder: Path) -> None:
        self._files = sorted(folder.glob(f"__{dist.get_rank()}_*"))
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._write)

    def __enter__(self) -> None:
        assert self._files, "the rank has written files"
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _write(self) -> None:
        handles = [file.open("r+b") for file in self._files]
        while not self._stop.wait(0.01):
            for file, handle in zip(self._files, handles, strict=True):
                handle.seek(0)
                handle.write(os.urandom(1 << 16))
                handle.flush()
                with suppress(FileNotFoundError):  # the new gang removes it
                    file.parent.mkdir(exist_ok=True)
                    file.write_bytes(os.urandom(1 << 16))
