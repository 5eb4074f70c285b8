"""Files of the disk tier: made, mapped and flushed, and what goes wrong with them, in words.

[Note: how a write can fail]
All blocks of a file are claimed when it is made, so a disk that is full says so there. Yet a flush may fail later: a
disk that promised more than it has, a quota, a cable. The mapped pages still hold the right values then, but the system
may drop them at any time and read back what the file has. So what was not written is lost, whatever memory says.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from ...base.errors import FsdpvizError


class MappedFile:
    """A file of fixed size in memory's place. Raises FsdpvizError, leaving no file, when the disk has no room."""

    def __init__(self, path: Path, size_bytes: int) -> None:
        self.path = path
        size_bytes = max(size_bytes, 1)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, size_bytes)
            except OSError:
                path.unlink()
                raise
            finally:
                os.close(descriptor)
            self._map = np.memmap(path, np.uint8, "r+", shape=(size_bytes,))
        except OSError as error:
            raise FsdpvizError(f"{_what_failed(path, error)}; choose another folder or Tier.HOST") from error

    def tensor(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.from_numpy(self._map)[: numel * dtype.itemsize].view(dtype)

    def flush(self) -> None:
        """Returns when the disk has all of it. Raises FsdpvizError when not, see [Note: how a write can fail]."""
        try:
            self._map.flush()
        except OSError as error:
            raise FsdpvizError(
                f"{_what_failed(self.path, error)}, so what the optimizer wrote is lost. Make room, then load a "
                "checkpoint into model and optimizer; until then this model cannot be used"
            ) from error


def _what_failed(path: Path, error: OSError) -> str:
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    why = "is full" if is_full else f"cannot be written ({error.strerror})"
    rank = dist.get_rank() if dist.is_initialized() else 0
    return f"rank {rank}: the disk tier in {path.parent} {why} at {path.name}"
