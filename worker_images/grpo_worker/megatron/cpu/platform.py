"""Import hook that rewrites ``megatron.core`` for CPUs while it is compiled.

Megatron-Core 0.16 names CUDA literally in about 400 places (``device="cuda"``,
``torch.cuda.current_device()``, ``"torch.cuda.FloatTensor"``). Replacing functions of torch
would leak into every library of the process; rewriting only Megatron's own syntax trees
leaves torch, Ray and transformers untouched. With a GPU present ``install()`` does nothing.

Import this module and call ``install()`` before anything from ``megatron.core``.
"""

import ast
import contextlib
import importlib.machinery
import os
import re
import sys
import types
from collections.abc import Sequence
from typing import Any

import torch

_PACKAGE = "megatron.core"
# Optional imports of Megatron-Core: it handles their absence, but not a failure to load them.
_NEEDS_DRIVER = frozenset({"flash_mla"})
_ALIAS = "__cpu_platform__"


class Stream:
    """Substitute for CUDA streams and events: on a CPU there is nothing to wait for."""

    cuda_stream = 0

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    def __eq__(self, other: object) -> bool:
        # All streams are equal, so Megatron-Core makes no copies on side streams.
        return isinstance(other, Stream)

    def __hash__(self) -> int:
        return 0

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_exc: object) -> None:
        pass

    def query(self) -> bool:
        return True

    def record_event(self, *_args: Any) -> "Stream":
        return self

    def elapsed_time(self, _other: "Stream") -> float:
        return 0.0

    def wait(self, *_args: Any) -> None:
        pass

    record = synchronize = wait_stream = wait_event = wait


class _Cuda(types.SimpleNamespace):
    """Substitute for ``torch.cuda`` inside ``megatron.core``; other names are torch's own."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)


_stream = Stream()
cuda = _Cuda(
    current_device=lambda: torch.device("cpu"),
    device_count=lambda: 1,
    set_device=lambda *_: None,
    is_available=lambda: False,
    Stream=Stream,
    Event=Stream,
    current_stream=lambda *_: _stream,
    default_stream=lambda *_: _stream,
    stream=lambda _s: contextlib.nullcontext(),
    synchronize=lambda *_: None,
    empty_cache=lambda: None,
    manual_seed=lambda seed: torch.default_generator.manual_seed(seed),
    get_rng_state=lambda *_, **__: torch.get_rng_state(),
    set_rng_state=lambda state, *_, **__: torch.set_rng_state(state),
    is_current_stream_capturing=lambda: False,
    memory_allocated=lambda *_: 0,
    max_memory_allocated=lambda *_: 0,
    memory_reserved=lambda *_: 0,
    reset_peak_memory_stats=lambda *_: None,
)


class Rewrite(ast.NodeTransformer):
    """Replacement of CUDA names and constants by CPU counterparts. ``hits`` counts the rewrites."""

    hits = 0

    def _hit(self, new: ast.expr, old: ast.AST) -> ast.expr:
        Rewrite.hits += 1
        return ast.copy_location(new, old)

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if node.value == "cuda":
            return self._hit(ast.Constant("cpu"), node)
        if isinstance(node.value, str) and re.fullmatch(r"torch\.cuda\.\w*Tensor", node.value):
            return self._hit(ast.Constant(node.value.replace(".cuda", "")), node)
        return node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        return node  # messages stay as they are

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        if node.attr == "cuda" and isinstance(node.value, ast.Name) and node.value.id == "torch":
            alias = ast.Name(_ALIAS, ast.Load())
            return self._hit(ast.Attribute(alias, "cuda", node.ctx), node)
        if node.attr == "is_cuda":
            return self._hit(ast.Attribute(node.value, "is_cpu", node.ctx), node)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        for keyword in node.keywords:
            if keyword.arg == "pin_memory" and isinstance(keyword.value, ast.Constant):
                keyword.value = self._hit(ast.Constant(False), keyword.value)
        if isinstance(node.func, ast.Attribute) and node.func.attr == "cuda":  # tensor.cuda()
            node.func.attr = "cpu"
            node.args, node.keywords = [], []
            Rewrite.hits += 1
        if isinstance(node.func, ast.Attribute) and node.func.attr == "record_stream":
            node.func.attr = "data_ptr"  # memory belongs to no stream here, and this changes nothing
            node.args, node.keywords = [], []
            Rewrite.hits += 1
        return node


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> types.CodeType:
        # Compiled every time and never cached, so the .pyc files in site-packages stay unmodified.
        source = self.get_data(self.path)
        tree = ast.fix_missing_locations(Rewrite().visit(ast.parse(source)))
        code = compile(tree, self.path, "exec", dont_inherit=True)
        assert isinstance(code, types.CodeType)
        return code

    def exec_module(self, module: types.ModuleType) -> None:
        from grpo_worker.megatron.cpu import patches

        setattr(module, _ALIAS, sys.modules[__name__])
        super().exec_module(module)
        patches.apply(module)


class _Finder:
    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name in _NEEDS_DRIVER:
            raise ModuleNotFoundError(f"{name} needs a CUDA driver", name=name)
        if name != _PACKAGE and not name.startswith(_PACKAGE + "."):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec and type(spec.loader) is importlib.machinery.SourceFileLoader:
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


def install() -> None:
    """Install the import hook on a machine without CUDA; idempotent.

    Raises RuntimeError when ``megatron.core`` was imported first: those modules would keep
    their CUDA names.
    """
    if torch.cuda.is_available() or any(isinstance(f, type) and f is _Finder for f in sys.meta_path):
        return
    loaded = [name for name in sys.modules if name.startswith(_PACKAGE)]
    if loaded:
        raise RuntimeError(f"platform.install() must run before {loaded[0]} is imported")
    # megatron.core.jit binds torch.compile at import; inductor would compile C++ at first call.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    sys.meta_path.insert(0, _Finder)
