"""Faults at points inside of real ranks: the process of a rank kills itself there, or hangs, once.

Nothing of this is in the product: ``FaultyTrainer`` is the trainer's rank with hooks around its parts. A
witness, a file that is written right before the fault, shows that it fired at its point.
"""

import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from grpo_worker.checkpointing.store import MARKER, step_and_attempt
from grpo_worker.common import files
from grpo_worker.profiling.progress import PROGRESS, READ
from grpo_worker.roles.dispatch import RankInfo
from grpo_worker.roles.trainer import TrainerWorker

FOLDER = "GRPO_TEST_FAULTS"  # environment variable: folder with faults.json, which gets the witnesses
# Points at which ranks wait: others kill them. TRUNCATED: after they have truncated the newest checkpoint.
BETWEEN, GENERATION, TRUNCATED = "between steps", "generation", "truncated checkpoint"
HANG, FROZEN = "hang", "frozen"  # in the forward pass: a rank that sleeps, and one that is stopped
FORWARD, BACKWARD, OPTIMIZER = "forward", "backward", "optimizer"
BEFORE_MARKER, AFTER_MARKER = "before the marker", "after the marker"
UPDATE, LOAD = "weight update", "load"
_PIECES = 5  # of a weight update, or of a checkpoint that is read, before the fault


@dataclass(frozen=True, slots=True)
class Fault:
    """A rank that dies at a point of a step. Of LOAD, ``step``: that of the fault before."""

    point: str
    step: int
    rank: int

    @property
    def witness(self) -> str:
        return f"{self.step:02d}-{self.point.replace(' ', '-')}.json"


def write_faults(folder: Path, faults: list[Fault]) -> None:
    folder.mkdir(parents=True)
    (folder / "faults.json").write_text(json.dumps([asdict(fault) for fault in faults]))


def pending(point: str, step: int) -> list[Fault]:
    """Return the faults at a point of a step that have not fired."""
    folder = Path(os.environ[FOLDER])
    faults = [Fault(**fault) for fault in json.loads((folder / "faults.json").read_text())]
    due = [fault for fault in faults if (fault.point, fault.step) == (point, step)]
    return [fault for fault in due if not (folder / fault.witness).exists()]


def kill(fault: Fault, pid: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Write the witness and send the process a signal."""
    witness = Path(os.environ[FOLDER]) / fault.witness
    witness.write_text(json.dumps({"pid": pid, "at": time.time()}))
    os.kill(pid, number)


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
        for inner in _inner(policy.trainable.optimizer):
            _after(inner, "step", lambda: self._die(OPTIMIZER))
        _before(PROGRESS, "add", self._counts)
        self._watch_marker()
        return info

    def publish_weights(self, version: int, *arguments: Any) -> str:
        self._step, self._pieces, self._updating = version + 1, 0, False
        return super().publish_weights(version, *arguments)  # type: ignore[arg-type]

    publish_weights.__dict__.update(TrainerWorker.publish_weights.__dict__)  # its registration

    def _die(self, point: str, step: int | None = None, number: signal.Signals = signal.SIGKILL) -> bool:
        """Send this process a signal if there is such a fault; return whether it goes on after that."""
        due = [f for f in pending(point, self._step if step is None else step) if f.rank == self._rank]
        for fault in due:
            kill(fault, os.getpid(), number)
        return bool(due)

    def _in_forward(self, *_: Any) -> None:
        if self._updating:
            self._die(FORWARD)
            self._die(FROZEN, number=signal.SIGSTOP)
            if self._die(HANG, number=signal.Signals.SIGCONT):  # which does nothing to a process that runs
                self.read_a_lost_disk()

    def read_a_lost_disk(self) -> None:
        time.sleep(3600)

    def _counts(self, work: str, amount: int = 1) -> None:
        if work == "backward passes":
            self._die(BACKWARD)
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
