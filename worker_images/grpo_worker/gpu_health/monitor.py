"""Keeps the newest readings of the GPUs, and what has been wrong with them since when."""

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from grpo_operator.api.gpu_messages import MAX_FINDINGS, GpuFinding, GpuReport, Severity
from grpo_worker.gpu_health.reading import GpuReading
from grpo_worker.gpu_health.verdict import Problem, problems
from grpo_worker.gpu_health.xids import meaning

XID_SECONDS = 3600.0  # how long an XID counts after which the GPU goes on
_ORDER = tuple(Severity)
_Key = tuple[str, str]  # UUID, reason


class GpuMonitor:
    """Health of all GPUs. ``now``: seconds since 1970. Its methods may be called from any thread."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._readings: list[GpuReading] = []
        self._once_active: dict[str, frozenset[int]] = {}  # NVLinks, by UUID
        self._since: dict[_Key, float] = {}
        self._xids: dict[tuple[str, int], float] = {}  # when a code was last seen
        self._counts: Counter[tuple[str, int]] = Counter()

    def take(self, readings: Iterable[GpuReading]) -> None:
        """Take new readings of all GPUs."""
        with self._lock:
            self._readings = list(readings)
            for gpu in self._readings:
                active = {link.link for link in gpu.links if link.active}
                self._once_active[gpu.uuid] = self._once_active.get(gpu.uuid, frozenset()) | active
            found = {(gpu.uuid, problem.reason) for gpu in self._readings for problem in self._problems(gpu)}
            self._since = {key: self._since.get(key, self._now()) for key in found}

    def take_xid(self, uuid: str, code: int) -> None:
        """Take an XID that the driver has just reported."""
        with self._lock:
            self._counts[uuid, code] += 1
            self._xids[uuid, code] = self._now()
            self._since.setdefault((uuid, f"Xid{code}"), self._now())

    @property
    def readings(self) -> list[GpuReading]:
        """The newest readings."""
        with self._lock:
            return self._readings

    @property
    def xid_counts(self) -> dict[tuple[str, int], int]:
        """Number of XIDs by UUID and code since the agent started."""
        with self._lock:
            return dict(self._counts)

    def report(self) -> GpuReport:
        """Return the findings, worst first."""
        with self._lock:
            found = [
                GpuFinding(
                    gpu=gpu.uuid,
                    index=gpu.index,
                    severity=problem.severity,
                    reason=problem.reason,
                    text=problem.text,
                    since=self._since.get((gpu.uuid, problem.reason), self._now()),
                )
                for gpu in self._readings
                for problem in self._problems(gpu)
            ]
            found.sort(key=lambda finding: -_ORDER.index(finding.severity))
            return GpuReport(gpus=len(self._readings), findings=tuple(found[:MAX_FINDINGS]))

    def severities(self) -> dict[str, Severity]:
        """Return the worst severity of each GPU by UUID."""
        with self._lock:
            return {
                gpu.uuid: max(
                    (p.severity for p in self._problems(gpu)), key=_ORDER.index, default=Severity.OK
                )
                for gpu in self._readings
            }

    def _problems(self, gpu: GpuReading) -> Iterator[Problem]:
        yield from problems(gpu, self._once_active.get(gpu.uuid, frozenset()))
        for (uuid, code), last in self._xids.items():
            severity, text = meaning(code)
            lasts = severity is Severity.SICK or self._now() - last < XID_SECONDS
            if uuid == gpu.uuid and severity is not Severity.OK and lasts:
                yield Problem(severity, f"Xid{code}", f"XID {code}: {text}")
