"""What a step needs and finds elsewhere comes to the side where the optimizer works, and goes home again.

The optimizer works on the side where the parameters lie: on the device, or on the host for parameters in host memory or
on disk. Gradients and optimizer state may lie in another tier:

    lies on   steps on the device              steps on the host
    DEVICE    is there                         D2H before the step, H2D after it
    HOST      H2D before, D2H after            is there
    DISK      read, H2D; D2H, write behind     is there: pages are read ahead, and written behind

Gradients are read only and do not go home. ``end`` lets the copies go, once what ``go`` returned has been waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ...base.labels import loop_label
from ...schedule import Tier, crosses
from .accelerator import Accelerator, Cargo, Event, Lane, Pool, Wire
from .storage import ShardStore


@dataclass(eq=False)
class Guest:
    """A tensor that a step needs. ``install`` puts it before the optimizer's eyes; None takes it away again."""

    home: torch.Tensor  # in its tier; lives longer than the visit
    tier: Tier
    install: Callable[[torch.Tensor | None], None]
    returns: bool = True  # False for what the step only reads


class Visit:
    """Guests of one unit's step. Every method is called by the training thread but ``reveal`` and ``hide``."""

    def __init__(self, unit: str, guests: Sequence[Guest], side: Tier, accelerator: Accelerator) -> None:
        self._unit, self._side, self._accelerator = unit, side, accelerator
        self._guests = tuple(guests)
        self._crossing = [guest for guest in guests if crosses(guest.tier, side)]
        self._here: dict[Guest, torch.Tensor] = {}  # copies on the side of the step; die in end
        self._read: dict[Guest, torch.Tensor] = {}  # in host memory, on their way from and to the disk; die in end
        self._taken: list[tuple[Pool, int]] = []
        self.arrived: list[Event] = []

    @property
    def crosses(self) -> bool:
        """False where all guests are on the side of the step already."""
        return bool(self._crossing)

    def come(self) -> None:
        """Issues the way here. Raises FsdpvizError where a budget has no room."""
        on_disk = [guest for guest in self._guests if guest.tier is Tier.DISK]
        buffered = [guest for guest in on_disk if guest in self._crossing]
        host, device = self._accelerator.pools.host, self._accelerator.pools.device
        self._take(host, buffered)
        self._take(device if self._side is Tier.DEVICE else host, self._crossing)
        for guest in buffered:
            self._read[guest] = self._accelerator.host_empty(guest.home.numel(), guest.home.dtype)

        def read() -> None:
            for guest in on_disk:
                if guest in self._read:
                    self._read[guest].copy_(guest.home)
                else:
                    guest.home.view(torch.uint8)[::4096].sum()  # one touch a page brings it in

        def cross() -> None:
            for guest in self._crossing:
                source = self._read.get(guest, guest.home)
                self._here[guest] = here = self._empty(source)
                here.copy_(source, non_blocking=True)

        if on_disk:
            self.arrived.append(self._accelerator.stream(Lane.READ).submit(self._label("disk_read"), read))
        if self._crossing:
            self.arrived.append(self._cross(cross, self._side, self.arrived, self._crossing))

    def reveal(self) -> None:
        """From here on the optimizer sees what has come."""
        for guest in self._crossing:
            guest.install(self._here[guest])

    def hide(self) -> None:
        """The optimizer sees what is at home; a gradient that rests elsewhere is out of its sight."""
        for guest in self._crossing:
            guest.install(guest.home if guest.returns else None)

    def go(self, after: Sequence[Event], store: ShardStore) -> list[Event]:
        """Issues the way home, after the step; the events are its end. A lost write is ``store``'s to tell."""
        back = [guest for guest in self._crossing if guest.returns]
        if not back:
            return list(after)

        def cross() -> None:
            for guest in back:
                self._read.get(guest, guest.home).copy_(self._here[guest], non_blocking=True)

        def write() -> None:
            for guest in to_disk:
                guest.home.copy_(self._read[guest])

        other = Tier.HOST if self._side is Tier.DEVICE else Tier.DEVICE
        events = [self._cross(cross, other, after, back)]
        if to_disk := [guest for guest in back if guest in self._read]:
            events.append(store.write(write, events))
        return events

    def end(self) -> None:
        """The copies go."""
        for pool, count_bytes in self._taken:
            pool.give(count_bytes)
        self._taken.clear()
        self._here.clear()
        self._read.clear()
        self.arrived.clear()

    def _take(self, pool: Pool, guests: Sequence[Guest]) -> None:
        count_bytes = sum(guest.home.nbytes for guest in guests)
        pool.take(count_bytes)
        self._taken.append((pool, count_bytes))

    def _empty(self, like: torch.Tensor) -> torch.Tensor:
        if self._side is Tier.DEVICE:
            return torch.empty_like(like, device=self._accelerator.device)
        return self._accelerator.host_empty(like.numel(), like.dtype)

    def _cross(self, work: Callable[[], None], towards: Tier, after: Sequence[Event], guests: Sequence[Guest]) -> Event:
        is_in = towards is Tier.DEVICE
        count_bytes = sum(guest.home.nbytes for guest in guests)
        lane, wire = (Lane.H2D, Wire.H2D) if is_in else (Lane.D2H, Wire.D2H)
        label = loop_label("h2d" if is_in else "d2h", self._unit, count_bytes)
        after = [*after, self._accelerator.compute_event()]
        return self._accelerator.stream(lane).submit(label, work, after, Cargo(wire, count_bytes))

    def _label(self, what: str) -> str:
        return loop_label(what, self._unit)
