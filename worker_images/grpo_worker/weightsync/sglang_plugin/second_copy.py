"""Second copy of a model's parameters, which receives a version while the engine generates with the first."""

import torch


class SecondCopy:
    """Memory as large as the parameters' storages of which views were asked for, on the same device.

    It begins with the parameters' content, so that bytes that no version brings stay as they are.
    ``nbytes``: of the memory.
    """

    def __init__(self) -> None:
        self._storages: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # address -> bytes of both copies

    @property
    def nbytes(self) -> int:
        return sum(copy.nbytes for _, copy in self._storages.values())

    def view(self, target: torch.Tensor) -> torch.Tensor:
        """Return the place of ``target``, a view of a parameter, in the second copy."""
        storage = target.untyped_storage()
        if storage.data_ptr() not in self._storages:
            parameter = torch.empty(0, dtype=torch.uint8, device=target.device).set_(storage)
            self._storages[storage.data_ptr()] = parameter, parameter.clone()
        _, copy = self._storages[storage.data_ptr()]
        empty = torch.empty(0, dtype=target.dtype, device=target.device)
        return empty.set_(copy.untyped_storage(), target.storage_offset(), target.size(), target.stride())

    def install(self) -> None:
        """Copy the content into the parameters; return when the device has done it."""
        for parameter, copy in self._storages.values():
            parameter.copy_(copy)
        if any(copy.is_cuda for _, copy in self._storages.values()):
            torch.cuda.current_stream().synchronize()
