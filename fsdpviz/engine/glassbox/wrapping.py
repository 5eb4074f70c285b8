"""Which modules become units: by block, by size, by rule. Also how a module's parameters are grouped into them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import nn

from ...base.errors import FsdpvizError
from ...base.labels import ROOT
from .held import Held, Place
from .layout import Region, owners

Units = dict[str, tuple[nn.Module, ...]]  # by name, in forward order, without the root


def by_block(module: nn.Module) -> Units:
    """Every child of every ModuleList: what most models call their blocks. None where there is no list."""
    lists = {name: child for name, child in module.named_modules() if isinstance(child, nn.ModuleList)}
    outer = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
    return {
        f"{name}.{index}" if name else str(index): (block,) for name in outer for index, block in enumerate(lists[name])
    }


def by_size(least_parameters: int) -> Callable[[nn.Module], Units]:
    """The smallest modules that hold at least so many parameters; FSDP1's size-based policy."""

    def units(module: nn.Module) -> Units:
        found: Units = {}
        _collect(module, "", least_parameters, found)
        found.pop("", None)
        return found

    return units


def _collect(module: nn.Module, name: str, least: int, found: Units) -> int:
    """Parameters below ``module`` that no unit has taken yet."""
    left = sum(parameter.numel() for parameter in module.parameters(recurse=False))
    for child_name, child in module.named_children():
        left += _collect(child, f"{name}.{child_name}" if name else child_name, least, found)
    if left < least or isinstance(module, nn.ModuleList | nn.ModuleDict):  # a list is never called
        return left
    found[name] = (module,)
    return 0


def by_rule(is_unit: Callable[[str, nn.Module], bool]) -> Callable[[nn.Module], Units]:
    """Every module that ``is_unit(name, module)`` says is one."""
    return lambda module: {name: (child,) for name, child in module.named_modules() if name and is_unit(name, child)}


def clean_name(name: str) -> str:
    """A name without what checkpointing's wrapper put into it."""
    return name.replace("_checkpoint_wrapped_module.", "")


def grouped(module: nn.Module, units: Mapping[str, tuple[nn.Module, ...]], ranks: int) -> dict[str, tuple[Held, Held]]:
    """Each unit's trainable and frozen parameters, laid out over ``ranks``; the root first."""
    names_of = {child: name for name, child in module.named_modules()}
    for unit, modules in units.items():
        for child in modules:
            _check_unit(unit, child, names_of)
    identity = {name: id(parameter) for name, parameter in module.named_parameters(remove_duplicate=False)}
    owned = owners(identity, {unit: [names_of[child] for child in modules] for unit, modules in units.items()}, ROOT)
    places: dict[int, list[Place]] = {}
    for child in module.modules():
        for attribute, parameter in child._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append(Place(child, attribute))
    by_name = dict(module.named_parameters(remove_duplicate=False))
    aliases: dict[int, list[str]] = {}
    for name, parameter in by_name.items():
        aliases.setdefault(id(parameter), []).append(clean_name(name))

    def held(names: list[str], trains: bool) -> Held:
        chosen = {name: by_name[name] for name in names if by_name[name].requires_grad == trains}
        shapes = {clean_name(name): tuple(parameter.shape) for name, parameter in chosen.items()}
        identities = [id(parameter) for parameter in chosen.values()]
        return Held(Region.of(shapes, ranks), [places[i] for i in identities], [aliases[i] for i in identities])

    return {unit: (held(names, True), held(names, False)) for unit, names in owned.items()}


def _check_unit(unit: str, child: nn.Module, names_of: Mapping[nn.Module, str]) -> None:
    if child not in names_of:
        raise FsdpvizError(f"a unit must be a module inside the model; {unit!r} ({type(child).__name__}) is not")
    if isinstance(child, nn.ModuleList | nn.ModuleDict):
        raise FsdpvizError(
            f"a unit must be a module that is called; {unit!r} is a {type(child).__name__}. Make its children units"
        )
