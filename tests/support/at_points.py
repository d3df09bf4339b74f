"""Faults at points inside of real ranks: the process of a rank kills itself there, or hangs, once.

Nothing of this is in the product: ``FaultyTrainer`` is the trainer's rank with hooks around its parts. A
witness, a file that is written right before the fault, shows that it fired at its point.
"""

import ctypes
import json
import math
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from grpo_worker.checkpointing.store import MARKER, step_and_attempt
from grpo_worker.common import files
from grpo_worker.profiling.progress import PROGRESS, READ
from grpo_worker.roles.dispatch import RankInfo
from grpo_worker.roles.trainer import TrainerWorker
from support.stuck_store import StuckStore

FOLDER = "GRPO_TEST_FAULTS"  # environment variable: folder with faults.json, which gets the witnesses
STEP, GATE = "step", "gate"  # files with the step that is made, and with the last one that may be
# Points at which ranks wait: others kill them. TRUNCATED: after they have truncated the newest checkpoint.
BETWEEN, GENERATION, TRUNCATED = "between steps", "generation", "truncated checkpoint"
# In the forward pass: a rank that sleeps, one that is stopped, one whose C code keeps the lock of Python.
HANG, FROZEN, LOCK = "hang", "frozen", "lock"
COLLECTIVE = "collective"  # in which a rank never joins: that of the gradients' norm
# Of an element of a rank's own gradient: NaN, or the first bit of its exponent or its last bit is changed.
NAN, EXPONENT, LAST_BIT = "not a number", "exponent", "last bit"
PAUSES = "pauses"  # of a rank, for four steps
FORWARD, BACKWARD, OPTIMIZER = "forward", "backward", "optimizer"
BEFORE_MARKER, AFTER_MARKER = "before the marker", "after the marker"
UPDATE, LOAD = "weight update", "load"
DIRECT, WAVE = "direct transfer", "wave"  # before a rank sends weights to engines, and after its first wave
# An engine has sent the first tokens of answers; its scheduler freezes then.
TOKENS, FREEZE = "tokens", "freeze"
REWARD_DIES, REWARD_HANGS = "reward dies", "reward hangs"  # with a request that it does not answer
# The store of checkpoints: full for six steps, read-only for a while, silent to the ranks for three steps.
FULL, READ_ONLY, STUCK = "full", "read-only", "stuck"
STUCK_STEPS = 3
_PIECES = 5  # of a weight update, or of a checkpoint that is read, before the fault


@dataclass(frozen=True, slots=True)
class Fault:
    """A rank that dies at a point of a step. Of LOAD, ``step``: that of the fault before."""

    point: str
    step: int
    rank: int

    @property
    def witness(self) -> str:
        return f"{self.step:02d}-{self.point.replace(' ', '-')}-{self.rank}.json"


def write_faults(folder: Path, faults: Sequence[Fault]) -> None:
    folder.mkdir(parents=True)
    (folder / "faults.json").write_text(json.dumps([asdict(fault) for fault in faults]))


def faults() -> list[Fault]:
    """Return all faults."""
    return [Fault(**f) for f in json.loads((Path(os.environ[FOLDER]) / "faults.json").read_text())]


def note(name: str, **line: Any) -> None:
    """Add a line with the time to ``name``.jsonl."""
    with (Path(os.environ[FOLDER]) / f"{name}.jsonl").open("a") as file:
        file.write(json.dumps({"at": time.time()} | line) + "\n")


def pending(point: str, step: int) -> list[Fault]:
    """Return the faults at a point of a step that have not fired."""
    due = [fault for fault in faults() if (fault.point, fault.step) == (point, step)]
    return [fault for fault in due if not (Path(os.environ[FOLDER]) / fault.witness).exists()]


def fire(fault: Fault, pid: int) -> None:
    """Write the witness."""
    witness = Path(os.environ[FOLDER]) / fault.witness
    witness.write_text(json.dumps({"pid": pid, "at": time.time()}))


def kill(fault: Fault, pid: int) -> None:
    """Write the witness and end the process."""
    fire(fault, pid)
    os.kill(pid, signal.SIGKILL)


class FaultyTrainer(TrainerWorker):
    """A real rank that dies at the points of faults.json."""

    def _build(self, rank: int, world: int, config: dict[str, Any]) -> RankInfo:
        info = super()._build(rank, world, config)
        policy = self._models.policy
        self._step = 0  # that is trained; 0: not known before the first weights of this process
        self._pieces = 0
        _before(policy, "update", lambda *_, **__: setattr(self, "_updating", True))
        self._updating = False
        policy.chunks[-1].decoder.layers[-1].register_forward_pre_hook(self._in_forward)
        _before(policy.trainable, "step", self._before_step)
        policy.chunks[-1].decoder.layers[-1].self_attention.linear_proj.weight.register_hook(self._gradient)
        for inner in _inner(policy.trainable.optimizer):
            _after(inner, "step", lambda: self._die(OPTIMIZER))
        _before(PROGRESS, "add", self._counts)
        self._watch_marker()
        self._disk, self._stuck_until = StuckStore(Path(config["checkpoints"])), 0
        return info

    def publish_weights(self, version: int, *arguments: Any) -> str:
        self._step, self._pieces, self._updating = version + 1, 0, False
        if self._step == self._stuck_until:
            self._disk.end()
            note(f"waited-{self._rank}", step=self._step, files=sorted(self._disk.waited))
        if self._fires(STUCK):
            self._disk.begin()
            self._stuck_until = self._step + STUCK_STEPS
        return super().publish_weights(version, *arguments)  # type: ignore[arg-type]

    publish_weights.__dict__.update(TrainerWorker.publish_weights.__dict__)  # its registration

    def send_weights(self, names: Sequence[str], patience: float) -> list[str]:
        self._die(DIRECT)
        return super().send_weights(names, patience)

    send_weights.__dict__.update(TrainerWorker.send_weights.__dict__)

    def _fires(self, point: str, step: int | None = None) -> bool:
        """Return whether there is such a fault of this rank, once."""
        due = [f for f in pending(point, self._step if step is None else step) if f.rank == self._rank]
        for fault in due:
            fire(fault, os.getpid())
        return bool(due)

    def _die(self, point: str, step: int | None = None) -> None:
        if self._fires(point, step):
            os.kill(os.getpid(), signal.SIGKILL)

    def _in_forward(self, *_: Any) -> None:
        if self._updating:
            self._die(FORWARD)
            if self._fires(FROZEN):
                os.kill(os.getpid(), signal.SIGSTOP)
            if self._fires(HANG):
                self.read_a_lost_disk()
            if self._fires(LOCK):
                ctypes.PyDLL(None).sleep(3600)  # PyDLL, unlike CDLL, keeps the lock during the call

    def _before_step(self) -> None:
        if self._fires(COLLECTIVE):
            self.look_for_something()

    def _gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return the gradient of a weight, in which the largest element is wrong if there is such a fault."""
        spoiled, largest = gradient.clone(), int(gradient.abs().argmax())
        if self._fires(NAN):
            spoiled.view(-1)[largest] = math.nan
        if self._fires(EXPONENT):
            spoiled.view(torch.int32).view(-1)[largest] ^= 1 << 30  # the first bit of its exponent
        if self._fires(LAST_BIT):
            spoiled.view(torch.int32).view(-1)[largest] ^= 1
        return spoiled

    def look_for_something(self) -> None:
        time.sleep(3600)

    def read_a_lost_disk(self) -> None:
        time.sleep(3600)

    def _counts(self, work: str, amount: int = 1) -> None:
        if work == "backward passes":
            self._die(BACKWARD)
        if work == "waves sent":
            self._die(WAVE)
        if work in ("bytes published", READ):
            self._pieces += 1
        if work == "bytes published" and self._pieces > _PIECES:
            self._die(UPDATE, self._step - 1)
        if work == READ and self._step == 0 and self._pieces > _PIECES:
            self._die(LOAD, 0)

    def _watch_marker(self) -> None:
        """Rank 0 completes checkpoints by renaming the marker into place, in a thread."""
        rename = files.rename

        def watched(temporary: Path, path: Path) -> None:
            if path.name != MARKER:
                rename(temporary, path)
                return
            step, _ = step_and_attempt(path.parent)
            self._die(BEFORE_MARKER, step)
            rename(temporary, path)
            note("complete", step=step)
            self._die(AFTER_MARKER, step)

        files.rename = watched


def _inner(optimizer: Any) -> list[Any]:
    from grpo_worker.megatron.optim.optimizer import inner_optimizers

    return list(inner_optimizers(optimizer))


def _before(owner: Any, name: str, hook: Callable[..., None]) -> None:
    method = getattr(owner, name)

    def hooked(*arguments: Any, **keywords: Any) -> Any:
        hook(*arguments, **keywords)
        return method(*arguments, **keywords)

    setattr(owner, name, hooked)


def _after(owner: Any, name: str, hook: Callable[[], Any]) -> None:
    method = getattr(owner, name)

    def hooked(*arguments: Any, **keywords: Any) -> Any:
        result = method(*arguments, **keywords)
        hook()
        return result

    setattr(owner, name, hooked)
