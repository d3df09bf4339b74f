"""Wave receiver: receives an engine rank's messages, forwards them within its host, and has them written."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from grpo_worker.weightsync.planner.engine_plan import BUFFERS, Part
from grpo_worker.weightsync.planner.schedule import CHECK_BYTES, Message
from grpo_worker.weightsync.protocol import byte_copies, fingerprint
from grpo_worker.weightsync.protocol.buffers import aligned
from grpo_worker.weightsync.sglang_plugin.model_writer import ExtraMemory
from grpo_worker.weightsync.sglang_plugin.second_copy import SecondCopy
from grpo_worker.weightsync.sglang_plugin.staged_receiver import DirectLoadError
from grpo_worker.weightsync.sglang_plugin.wave_loader import Arrival, WaveLoader
from grpo_worker.weightsync.transport.rendezvous import Transfer, TransferError, TransferGroup


@dataclass(slots=True)
class _Arrivals:
    """Messages of a wave in an engine rank: those from trainer ranks, and those that its host forwards.

    ``forwards``: those from trainer ranks that this rank forwards.
    """

    landing: list[Arrival] = field(default_factory=list)
    forwarded: list[Arrival] = field(default_factory=list)

    @property
    def forwards(self) -> list[Arrival]:
        return [arrival for arrival in self.landing if arrival[0].siblings]


@dataclass(frozen=True, slots=True)
class Received:
    """A version in an engine rank. ``counted``, ``total``: number and sum of the bytes that it counts.

    ``extra_bytes``: peak of the device's memory above its level before. ``seconds``: by part.
    """

    counted: int
    total: int
    extra_bytes: int
    seconds: dict[str, float]


class WaveReceiver:
    """Receives versions in engine rank ``rank``, whose engine's first rank is ``first`` in the group.

    ``second``: copy of the model into which ``loaders`` write; None: they write into the model.
    ``nbytes``: bytes that a version brings to this rank.
    """

    def __init__(
        self,
        part: Part,
        rank: int,
        group: TransferGroup,
        first: int,
        loaders: Sequence[WaveLoader],
        device: torch.device,
        second: SecondCopy | None = None,
    ) -> None:
        self._rank = rank
        self._group = group
        self._first = first
        self._loaders = loaders
        self._device = device
        self._second = second
        self._cancelled = False
        self._waves, self._sizes = _arrivals(part, rank)
        self._messages = sum(map(len, part.waves))
        self.nbytes = sum(message.nbytes for wave in part.waves for message in wave)
        self._counted = _counted_bytes(part, rank)

    @property
    def buffer_bytes(self) -> int:
        """Memory for receiving: uint8 [bytes] of BUFFERS waves."""
        return BUFFERS * max(self._sizes, default=0)

    @property
    def second_bytes(self) -> int:
        """Memory of the second copy."""
        return 0 if self._second is None else self._second.nbytes

    def prepare(self) -> None:
        """Do before the first version what every version needs: compile kernels, list the copies of waves."""
        fingerprint.compile_for(self._device)
        byte_copies.compile_for(self._device)
        for loader in self._loaders:
            for number, wave in enumerate(self._waves):
                loader.prepare(2 * number, wave.landing)
                loader.prepare(2 * number + 1, wave.forwarded)

    def receive(self, patience: float) -> Received:
        """Fetch one version and install it; see both."""
        received = self.fetch(patience)
        began = time.monotonic()
        self.install()
        received.seconds["receive_and_load"] += time.monotonic() - began
        return received

    def install(self) -> None:
        """Complete the fetched version in the model. Raises DirectLoadError if its parameters have moved."""
        if self._second is not None:
            for loader in self._loaders:
                loader.check()
            self._second.install()
        for loader in self._loaders:
            loader.finish()

    def cancel(self) -> None:
        """End a ``fetch`` of another thread before it writes more."""
        self._cancelled = True

    def fetch(self, patience: float) -> Received:
        """Receive and write one version; ``patience``: seconds that the rank waits for a wave.

        All waves are received even after one that cannot be written, because other members wait for this
        rank. Raises TransferError for missing bytes, and DirectLoadError for wrong ones.
        """
        began, waited, extra = time.monotonic(), 0.0, ExtraMemory(str(self._device))
        # Every rank starts its transfers in the same order, so none waits for one that cannot start. The
        # first ones start before all else: what has to be prepared takes as long as they do.
        buffers, landings = self._begin(patience)
        writer, forwarding = _Writer(self._loaders, self._messages, self._device), None
        for number, wave in enumerate(self._waves):
            if number:
                landings.append(self._land(number + 1, buffers, patience))
            landing = landings.popleft()
            waited -= time.monotonic()
            _wait(landing)
            if self._cancelled:
                raise TransferError("this rank has left the link")
            waited += time.monotonic()
            previous, forwarding = forwarding, self._forward(number, buffers, patience)
            writer.write(2 * number, wave.landing, buffers[number % BUFFERS], landed=True)
            _wait(previous)
            if number:
                before = self._waves[number - 1].forwarded
                writer.write(2 * number - 1, before, buffers[(number - 1) % BUFFERS], landed=False)
        _wait(forwarding)
        if self._waves:
            last = len(self._waves) - 1
            writer.write(2 * last + 1, self._waves[last].forwarded, buffers[last % BUFFERS], landed=False)
        total = writer.end()
        seconds = {"receive_and_load": time.monotonic() - began, "wait": waited}
        return Received(self._counted, total, extra.peak(), seconds)

    def _begin(self, patience: float) -> tuple[list[torch.Tensor], deque[Transfer | None]]:
        """Allocate BUFFERS buffers, and start to receive the first two waves, each when it has its own."""
        size = max(self._sizes, default=0)
        buffers: list[torch.Tensor] = []
        landings: deque[Transfer | None] = deque()
        for number in range(BUFFERS):
            buffers.append(torch.empty(size, dtype=torch.uint8, device=self._device))
            if number < 2:
                landings.append(self._land(number, buffers, patience))
        return buffers, landings

    def _land(self, number: int, buffers: Sequence[torch.Tensor], patience: float) -> Transfer | None:
        """Start to receive a wave from trainer ranks; None if nothing comes."""
        if number >= len(self._waves) or not self._waves[number].landing:
            return None
        buffer = buffers[number % BUFFERS]
        receives = [(_bytes(buffer, a), a[0].source) for a in self._waves[number].landing]
        return self._group.exchange((), receives, time.monotonic() + patience)

    def _forward(self, number: int, buffers: Sequence[torch.Tensor], patience: float) -> Transfer | None:
        """Start to exchange a wave that has landed within the host; None if there is nothing to exchange."""
        wave, buffer, first = self._waves[number], buffers[number % BUFFERS], self._first
        sends = [(_bytes(buffer, a), first + to) for a in wave.forwards for to in a[0].siblings]
        receives = [(_bytes(buffer, a), first + a[0].landing) for a in wave.forwarded]
        if not (sends or receives):
            return None
        return self._group.exchange(sends, receives, time.monotonic() + patience)


def _wait(transfer: Transfer | None) -> None:
    if transfer is not None:
        transfer.wait()


class _Writer:
    """Has arrivals written, and compares their fingerprints at the end."""

    def __init__(self, loaders: Sequence[WaveLoader], messages: int, device: torch.device) -> None:
        self._loaders = loaders
        self._checks = _Checks(messages, device)
        self._problem = ""
        self._attempt("before the first wave", lambda loader: loader.start())

    def write(self, number: int, arrivals: Sequence[Arrival], buffer: torch.Tensor, landed: bool) -> None:
        """Write arrivals unless earlier ones could not be written; equal numbers stand for equal arrivals.

        ``landed``: they came from trainer ranks.
        """
        for arrival in arrivals:
            self._checks.add(arrival[0], _bytes(buffer, arrival), landed)
        if arrivals:
            self._attempt(f"wave {number // 2}", lambda loader: loader.write(number, arrivals, buffer))

    def _attempt(self, place: str, work: Callable[[WaveLoader], object]) -> None:
        """Do something with each loader unless an earlier attempt failed."""
        if self._problem:
            return
        try:
            for loader in self._loaders:
                work(loader)
        except Exception as error:  # noqa: BLE001 - the remaining waves must be received all the same
            self._problem = f"{place}: {type(error).__name__}: {error}"

    def end(self) -> int:
        """Return the sum of the counted bytes. Raises DirectLoadError if bytes are wrong or not written."""
        total = self._checks.compare()
        if self._problem:
            raise DirectLoadError(self._problem)
        return total


class _Checks:
    """Fingerprints of ``messages`` messages that are received, and those that were sent with them."""

    def __init__(self, messages: int, device: torch.device) -> None:
        self._messages: list[Message] = []
        self._ours = torch.zeros(messages, dtype=torch.int64, device=device)
        self._sent = torch.zeros(messages, dtype=torch.int64, device=device)
        self._sums = torch.zeros(messages, dtype=torch.int64, device=device)
        self._counted: list[int] = []  # messages whose sums are added up

    def add(self, message: Message, data: torch.Tensor, landed: bool) -> None:
        number = len(self._messages)
        self._messages.append(message)
        place = slice(number, number + 1)
        fingerprint.write_checks(data[:-CHECK_BYTES], self._ours[place], self._sums[place])
        self._sent[place].copy_(data[-CHECK_BYTES:].view(torch.int64))
        if landed and message.counted:
            self._counted.append(number)

    def compare(self) -> int:
        """Return the sum of the counted bytes.

        Raises DirectLoadError if bytes differ from those that were sent.
        """
        # One call, because it waits for the device.
        ours, sent, sums = torch.stack([self._ours, self._sent, self._sums]).tolist()
        pairs = zip(self._messages, ours, sent, strict=True)
        wrong = sorted({message.source for message, mine, theirs in pairs if mine != theirs})
        if wrong:
            raise DirectLoadError(f"the bytes of trainer ranks {wrong[:5]} are not those that were sent")
        return sum(sums[number] for number in self._counted)


def _arrivals(part: Part, rank: int) -> tuple[list[_Arrivals], list[int]]:
    """Return each wave's arrivals, and the bytes of its buffer."""
    waves, sizes = [], []
    for wave in part.waves:
        arrivals, start = _Arrivals(), 0
        for message in wave:
            (arrivals.landing if message.landing == rank else arrivals.forwarded).append((message, start))
            start += aligned(message.nbytes)
        waves.append(arrivals)
        sizes.append(start)
    return waves, sizes


def _counted_bytes(part: Part, rank: int) -> int:
    messages = (message for wave in part.waves for message in wave)
    counted = [message for message in messages if message.counted and message.landing == rank]
    return sum(part.tensors[r.tensor].nbytes(r.box) for message in counted for r in message.regions)


def _bytes(buffer: torch.Tensor, arrival: Arrival) -> torch.Tensor:
    message, start = arrival
    return buffer[start : start + message.nbytes]
