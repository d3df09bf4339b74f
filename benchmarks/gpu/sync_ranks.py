"""Trainer ranks for benchmarks/gpu/sync.py, each a process with a GPU and the shards of two versions."""

import multiprocessing
import statistics
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import PrefixStore

from grpo_worker.megatron.families.registry import family_of
from grpo_worker.quantization.fp8 import Part, quantised_parts
from grpo_worker.weightsync.agent.engine_client import Engine
from grpo_worker.weightsync.protocol.link_offer import LinkOffer
from grpo_worker.weightsync.protocol.tiling import TensorPlan
from grpo_worker.weightsync.trainer.links import TrainerLinks
from grpo_worker.weightsync.transport import torch_group

TIMEOUT = timedelta(seconds=120)


class Rank:
    """A trainer rank. Even versions have one set of weights, odd versions another."""

    def __init__(self, rank: int, world: int, device: str, model: dict[str, Any], fp8: bool) -> None:
        self._device, self._fp8 = torch.device(device), fp8
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        self._links = TrainerLinks(rank, world, self._device, self._gather)
        self._own, self._gathered = b"", list[bytes]()
        self._versions = [list(_parts(rank, world, self._device, model, seed)) for seed in (0, 1)]
        self._before = 0

    def _gather(self, own: bytes) -> list[bytes]:
        self._own = own  # these ranks have no gang of their own: their parent passes the layouts on
        return self._gathered

    def layout(self) -> bytes:
        """Return what this rank tells rank 0 of what it holds."""
        self._links.exchange_layouts(self._versions[0], self._fp8)
        return self._own

    def know(self, layouts: list[bytes]) -> None:
        """Let rank 0 know what all ranks hold."""
        self._gathered = layouts
        self._links.exchange_layouts(self._versions[0], self._fp8)

    def known(self) -> bool:
        """Return whether rank 0 knows what all ranks hold."""
        return bool(self._gathered)

    def nbytes(self) -> int:
        """Return the bytes of this rank's part of a version."""
        return sum(part[-1].nbytes for part in self._parts_of(0))

    def listen(self, name: str) -> int:
        return self._links.listen([name], self._fp8)

    def open(self, offer: LinkOffer) -> str:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        self._before = self._allocated()
        return self._links.open(offer)

    def send(self, link: str, version: int, patience: float) -> tuple[str, float]:
        """Send a version over a link; return the error, or an empty string, and the seconds.

        ``patience``: seconds that the rank waits for a wave.
        """
        started = time.monotonic()
        (problem,) = self._links.send([link], self._versions[version % 2], patience)
        return problem, time.monotonic() - started

    def extra_bytes(self) -> int:
        """Return the largest rise of allocated GPU memory since the last link was opened."""
        return self._allocated() - self._before

    def _allocated(self) -> int:
        return torch.cuda.max_memory_allocated() if self._device.type == "cuda" else 0

    def close(self, link: str) -> None:
        self._links.close([link])

    def per_tensor(self, url: str, key: str, bucket: int, versions: list[int]) -> list[float]:
        """Run the baseline and return the seconds of each version.

        The baseline is the distributed update of RL frameworks: a broadcast for each tensor and a request for
        each bucket of names. The last request flushes the engine's cache.
        """
        engine = Engine(url, 600, Path(key))
        store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        backend = "nccl" if self._device.type == "cuda" else "gloo"
        body = {"master_address": "127.0.0.1", "master_port": store.port, "rank_offset": 1}
        body |= {"world_size": 2, "group_name": "plain", "backend": backend}
        joining = threading.Thread(
            target=engine._call, args=("POST", "/init_weights_update_group"), kwargs=body
        )
        joining.start()
        group = torch_group.join(PrefixStore("plain", store), "plain", 0, 2, TIMEOUT, backend)
        joining.join()
        return [self._plain(engine, group, version, bucket) for version in versions]

    def _plain(self, engine: Engine, group: Any, version: int, bucket: int) -> float:
        tensors = [(part[0], part[-1]) for part in self._parts_of(version)]
        started = time.monotonic()
        engine.pause()
        engine.begin_update()
        buckets = list(_buckets(tensors, bucket))
        for names in buckets:
            plans = [TensorPlan(n, tuple(t.shape), str(t.dtype).removeprefix("torch."), ()) for n, t in names]
            last = {"flush_cache": names is buckets[-1], "weight_version": str(version)}
            body = engine._tensors("plain", plans) | last
            with ThreadPoolExecutor(1) as thread:
                asked = thread.submit(engine._call, "POST", "/update_weights_from_distributed", **body)
                works = [dist.broadcast(t, src=0, group=group, async_op=True) for _, t in names]
                asked.result()
                for work in works:
                    work.wait()  # type: ignore[union-attr]
        engine.end_update()
        engine.resume()
        return time.monotonic() - started

    def _parts_of(self, version: int) -> list[Part]:
        found = self._versions[version % 2]
        return list(quantised_parts(found)) if self._fp8 else found

    def raw(self, port: int, world: int, nbytes: int, bucket: int) -> float:
        return broadcast(port, 0, world, str(self._device), nbytes, bucket)

    def copied(self, nbytes: int, bucket: int) -> float:
        """Return the seconds of copying so many bytes within the GPU's memory; the median of five."""
        source, target = (torch.zeros(bucket, dtype=torch.uint8, device=self._device) for _ in range(2))
        taken = []
        for _ in range(6):
            torch.cuda.synchronize()
            started = time.monotonic()
            for start in range(0, nbytes, bucket):
                size = min(bucket, nbytes - start)
                target[:size].copy_(source[:size])
            torch.cuda.synchronize()
            taken.append(time.monotonic() - started)
        return statistics.median(taken[1:])

    def same_quantisation(self) -> bool:
        """Return whether the GPU's kernel and the CPU quantise to the same bits."""
        for part in self._versions[0][:40]:
            for mine, other in zip(
                quantised_parts([part]), quantised_parts([(*part[:-1], part[-1].cpu())]), strict=True
            ):
                if not torch.equal(mine[-1].cpu().view(torch.uint8), other[-1].view(torch.uint8)):
                    return False
        return True


def broadcast(port: int, rank: int, world: int, device: str, nbytes: int, bucket: int) -> float:
    """Return the seconds of a bare broadcast of ``nbytes`` from rank 0, in buckets; the median of five."""
    here = torch.device(device)
    store = TCPStore("127.0.0.1", port, None, False)
    cuda = here.type == "cuda"
    if cuda:
        torch.cuda.set_device(here)
    dist.init_process_group("nccl" if cuda else "gloo", store=store, rank=rank, world_size=world)
    flat, taken = torch.zeros(min(2 * bucket, nbytes), dtype=torch.uint8, device=here), []
    for _ in range(6):
        dist.all_reduce(torch.ones(1, device=here))
        if cuda:
            torch.cuda.synchronize()
        started = time.monotonic()
        for start in range(0, nbytes, bucket):
            size = min(bucket, nbytes - start)
            at = (start // bucket) % 2 * bucket if nbytes >= 2 * bucket else 0
            dist.broadcast(flat[at : at + size], src=0)
        dist.all_reduce(torch.ones(1, device=here))
        if cuda:
            torch.cuda.synchronize()
        taken.append(time.monotonic() - started)
    dist.destroy_process_group()
    return statistics.median(taken[1:])


def _parts(rank: int, world: int, device: torch.device, model: dict[str, Any], seed: int) -> Any:
    """Yield a rank's shards: whole experts, and rows of other matrices where blocks of 128 allow it."""
    generator = torch.Generator(device).manual_seed(seed)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    family, drafts = family_of(model), bool(model.get("num_nextn_predict_layers"))
    for name, shape in (family.shapes(model) | (family.mtp_shapes(model) if drafts else {})).items():
        kind = torch.float32 if name.endswith("e_score_correction_bias") else dtype
        whole = (
            torch.randn(shape, generator=generator, device=device, dtype=torch.float32).mul_(0.02).to(kind)
        )
        if drafts:
            _let_drafts_agree(name, whole, seed)
        if ".mlp.experts." in name:
            owner = int(name.split(".experts.")[1].split(".")[0]) * world // model["n_routed_experts"]
            if owner == rank:
                yield name, shape, 0, 0, whole
        elif shape[0] % (128 * world) == 0:
            rows = shape[0] // world
            yield name, shape, 0, rank * rows, whole[rank * rows : (rank + 1) * rows].clone()
        elif rank == 0:
            yield name, shape, 0, 0, whole


def _let_drafts_agree(name: str, tensor: torch.Tensor, seed: int) -> None:
    """Change a drawn tensor so that the model and the layer that drafts predict much the same.

    Both see little but the last token then: norms pass on what they get, and the layer that drafts takes the
    embedding and leaves the hidden state out. The signs of both last norms depend on ``seed``, so a layer
    and a model of different versions do not agree.
    """
    if name.endswith(("model.norm.weight", "shared_head.norm.weight")):
        signs = torch.randint(2, tensor.shape, generator=torch.Generator().manual_seed(seed))
        tensor.copy_(2 * signs - 1)
    elif name.endswith("norm.weight"):
        tensor.fill_(1.0)
    elif name.endswith("eh_proj.weight"):
        tensor.copy_(torch.eye(*tensor.shape, device=tensor.device))
    elif name.endswith("embed_tokens.weight"):
        tensor.mul_(200.0)
    elif name.endswith("lm_head.weight"):
        tensor.mul_(10.0)


def _buckets(tensors: list[tuple[str, torch.Tensor]], limit: int) -> list[list[tuple[str, torch.Tensor]]]:
    found: list[list[tuple[str, torch.Tensor]]] = [[]]
    used = 0
    for index, (name, tensor) in enumerate(tensors):
        # Its loader needs these halves together.
        half = ".q_a_proj" in name or ".kv_a_proj" in name
        if used > limit and not half and index:
            found.append([])
            used = 0
        found[-1].append((name, tensor))
        used += tensor.nbytes
    return found


class Processes:
    """Ranks in their own processes, which are called in parallel."""

    def __init__(self, world: int, devices: list[str], model: dict[str, Any], fp8: bool) -> None:
        context = multiprocessing.get_context("spawn")
        self._threads = ThreadPoolExecutor(world)
        self._pipes, self._processes = [], []
        for rank in range(world):
            mine, theirs = context.Pipe()
            arguments = (theirs, rank, world, devices[rank], model, fp8)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            self._pipes.append(mine)
            self._processes.append(process)

    def ask(self, rank: int, method: str, *args: Any) -> "Future[Any]":
        return self._threads.submit(self._ask, rank, method, args)

    def all(self, method: str, *args: Any) -> list[Any]:
        asked = [self.ask(rank, method, *args) for rank in range(len(self._pipes))]
        return [future.result() for future in asked]

    def _ask(self, rank: int, method: str, args: tuple[Any, ...]) -> Any:
        self._pipes[rank].send((method, args))
        kind, value = self._pipes[rank].recv()
        if kind == "error":
            raise RuntimeError(f"{method} of rank {rank}: {value}")
        return value

    def end(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


def _serve(pipe: Any, *args: Any) -> None:
    rank = Rank(*args)
    while True:
        method, arguments = pipe.recv()
        try:
            pipe.send(("value", getattr(rank, method)(*arguments)))
        except Exception as error:  # noqa: BLE001 - sent to the parent process
            pipe.send(("error", repr(error)))
