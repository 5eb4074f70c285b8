"""What a sharded model gives to checkpoints and takes from them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import torch

from .sharded_state import load_sharded_state_dict, sharded_state_dict
from .state import full_state_dict, load_full_state_dict

if TYPE_CHECKING:
    from .model import ShardedModel


class Saved:
    """The state of a ShardedModel. Every method ends what is under way first."""

    def state_dict(
        self, *_args: Any, destination: dict[str, Any] | None = None, prefix: str = "", **_options: Any
    ) -> dict[str, Any]:
        """Parameters as DTensors of this rank's rows, and buffers: FSDP2's format, for distributed checkpoints.

        Collective over all ranks. Copies, by the original names; see ``sharded_state.py``.
        """
        state = {} if destination is None else destination
        state.update({f"{prefix}{name}": value for name, value in sharded_state_dict(self._settled()).items()})
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Takes what ``state_dict`` of any world size gave, or whole tensors. Collective over all ranks.

        Values are always copied; ``assign`` is there for callers of nn.Module's and has no effect.
        """
        load_sharded_state_dict(self._settled(check=False), state_dict, strict=strict)

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """Every parameter and buffer, whole and on the CPU, by original name. Collective over all ranks."""
        return full_state_dict(self._settled())

    def load_full_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Takes this rank's shards from whole parameters and buffers, saved by any world size. All ranks call it."""
        load_full_state_dict(self._settled(check=False), state)

    def _settled(self, *, check: bool = True) -> ShardedModel:
        """The model with nothing under way. What a disk has lost is no state, and is mended by loading one."""
        model = cast("ShardedModel", self)
        model.abandon()
        model.accelerator.compute_event().synchronize()  # copies in may still read what the host is about to write
        if check:
            model.check_writes(wait=True)
        return model
