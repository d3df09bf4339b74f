"""Nested Python state as JSON and named tensors, so that nobody who reads it runs what it contains.

None, booleans, integers, strings, finite floats and lists are themselves in JSON. Everything else is an
object whose only field says what it is: a ``tuple``, a ``dict`` (pairs, because keys need not be strings), a
``float`` (an infinity or NaN), or the name of a ``tensor``, an ``array`` or a NumPy ``scalar``. Any other
type is refused, never converted.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

_PLAIN = (type(None), bool, int, str)


class StateError(ValueError):
    """The state contains a type that is not stored, or the file is not one of a state."""


def flatten(state: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return the JSON of a state, and its tensors by path.

    Paths that share one whole tensor share it in the result too; views of different parts of a tensor do not.
    Raises StateError, which names the path of a type that is not stored.
    """
    encoder = _Encoder()
    return encoder.encode(state, ""), encoder.tensors


def nest(tree: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Return the state that ``flatten`` took. Raises StateError for a tree that it does not write."""
    if type(tree) in (*_PLAIN, float):
        return tree
    if type(tree) is list:
        return [nest(item, tensors) for item in tree]
    if type(tree) is not dict or len(tree) != 1:
        raise StateError(f"a value of kind {_kind(tree)} is in the state's description")
    ((kind, content),) = tree.items()
    try:
        return _KINDS[kind](content, tensors)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        if isinstance(error, StateError):
            raise
        raise StateError(f"a value of kind {kind!r} cannot be read: {error!r}") from error


class _Encoder:
    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._names: dict[tuple[Any, ...], str] = {}  # memory that a tensor covers -> its name

    def encode(self, value: Any, path: str) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            return value
        if kind is float:
            return value if math.isfinite(value) else {"float": repr(value)}
        if kind is list:
            return self._items(value, path)
        if kind is tuple:
            return {"tuple": self._items(value, path)}
        if kind is dict:
            pairs = value.items()
            return {"dict": [[self._key(k, path), self.encode(v, f"{path}/{_text(k)}")] for k, v in pairs]}
        return self._stored(value, path)

    def _items(self, values: Any, path: str) -> list[Any]:
        return [self.encode(item, f"{path}/{index}") for index, item in enumerate(values)]

    def _key(self, key: Any, path: str) -> Any:
        parts = key if type(key) is tuple else (key,)
        if not all(type(part) in (*_PLAIN, float) for part in parts):
            raise StateError(
                f"the key {key!r} at {path or '/'} of the state is not stored: use numbers and strings"
            )
        return self.encode(key, path)

    def _stored(self, value: Any, path: str) -> dict[str, str]:
        if type(value) in (torch.Tensor, torch.nn.Parameter):
            return {"tensor": self._named(value.detach(), path)}
        if type(value) is np.ndarray and value.dtype.kind in "biufc":
            return {"array": self._named(torch.from_numpy(_native(value)), path)}
        if isinstance(value, np.generic) and value.dtype.kind in "biufc":
            return {"scalar": self._named(torch.from_numpy(_native(np.asarray(value))), path)}
        raise StateError(
            f"{path or '/'} of the state is of type {_kind(value)}, which is not stored: use numbers, "
            "strings, lists, tuples, dicts, tensors or arrays"
        )

    def _named(self, tensor: torch.Tensor, path: str) -> str:
        if tensor.layout is not torch.strided or tensor.device.type != "cpu" or tensor.is_quantized:
            raise StateError(
                f"{path or '/'} of the state is a {tensor.layout} tensor on {tensor.device}: copy it to a "
                "dense one in host memory"
            )
        memory = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.is_conj())
        if tensor.numel() and memory in self._names:
            return self._names[memory]
        name = path or "/"
        while name in self.tensors:  # the keys 1 and "1" have the same text
            name += "'"
        self.tensors[name] = tensor
        self._names[memory] = name
        return name


def _native(array: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
    """Return a writable copy in this machine's byte order, as torch needs it."""
    return np.array(array, dtype=array.dtype.newbyteorder("="), order="C")


def _array(name: str, tensors: Mapping[str, torch.Tensor]) -> "np.ndarray[Any, Any]":
    return tensors[name].numpy().copy()


def _pairs(content: Any, tensors: Mapping[str, torch.Tensor]) -> dict[Any, Any]:
    return {nest(key, tensors): nest(value, tensors) for key, value in content}


_KINDS: dict[str, Any] = {
    "float": lambda content, _: float(content),
    "tuple": lambda content, tensors: tuple(nest(item, tensors) for item in content),
    "dict": _pairs,
    "tensor": lambda content, tensors: tensors[content],
    "array": _array,
    "scalar": lambda content, tensors: _array(content, tensors)[()],
}


def _text(key: Any) -> str:
    return str(key).encode("ascii", "backslashreplace").decode()


def _kind(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
