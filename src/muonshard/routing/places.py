"""Where a model holds its parameters, and what the names and types there say."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from torch import nn

WRAPPER_NAMES = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
GENERIC_NAMES = frozenset({"weight", "weights", "w", "kernel", "param", "params", "table", "data"})


@dataclass(frozen=True, slots=True)
class Site:
    """A module and the way to it.

    Attributes:
        path: the names from the model down to the module, without those that wrappers add.
        module: the module.
        parents: the modules above it, the model first, without wrappers.
    """

    path: tuple[str, ...]
    module: nn.Module
    parents: tuple[nn.Module, ...]

    @property
    def in_attention(self) -> bool:
        """Whether the module is, or is part of, one whose name or class says attention, the model's class aside."""
        names = (*self.path, *(type(module).__name__ for module in (*self.parents[1:], self.module)))
        return any(map(says_attention, names))

    @property
    def in_expert(self) -> bool:
        """Whether the module is, or is part of, one whose name or class says expert."""
        return any({"expert", "experts"} & set(words(name)) for name in (*self.path, type(self.module).__name__))

    @property
    def in_numbered_block(self) -> bool:
        """Whether the module is part of a series, such as the blocks of a transformer. Numbers that tell whole models
        of a ModuleList apart, as pipeline stages are, do not count."""
        models = bool(self.parents) and isinstance(self.parents[0], nn.ModuleList)
        return any(part.isdigit() for part in self.path[models:])


@dataclass(frozen=True, slots=True)
class Place(Site):
    """A module that holds a parameter, as `attribute`."""

    attribute: str

    @property
    def name(self) -> str:
        """The parameter's name here, without what wrappers add."""
        return ".".join((*self.path, self.attribute))

    @property
    def label(self) -> str:
        """The part of the name that says most: the attribute, or the module's name where that is just "weight"."""
        generic = self.attribute in GENERIC_NAMES or self.attribute.isdigit()
        return self.path[-1] if generic and self.path else self.attribute


def sites(model: nn.Module) -> list[Site]:
    """Every module of the model, as often as it is registered, in the order of `named_modules`."""
    modules = dict(model.named_modules(remove_duplicate=False))
    unwrapped_root = _outer_wrappers(model)
    return [_site(name.split(".") if name else [], module, modules, unwrapped_root) for name, module in modules.items()]


def places(found: list[Site]) -> dict[int, list[Place]]:
    """The places of each parameter, by its id."""
    by_parameter: dict[int, list[Place]] = {}
    for site in found:
        for attribute, parameter in site.module.named_parameters(recurse=False, remove_duplicate=False):
            place = Place(site.path, site.module, site.parents, attribute)
            by_parameter.setdefault(id(parameter), []).append(place)
    return by_parameter


def _outer_wrappers(model: nn.Module) -> int:
    """How many modules around the real model only wrap it: DistributedDataParallel, torch.compile, ..."""
    count = 0
    while True:
        children = dict(model.named_children())
        own = next(model.parameters(recurse=False), None)
        if len(children) != 1 or own is not None or not children.keys() <= WRAPPER_NAMES | {"module"}:
            return count
        model = next(iter(children.values()))
        count += 1


def _site(parts: list[str], module: nn.Module, modules: dict[str, nn.Module], outer: int) -> Site:
    path: list[str] = []
    parents: list[nn.Module] = []
    for depth, part in enumerate(parts):
        if depth >= outer and part not in WRAPPER_NAMES:  # otherwise the parent is a wrapper
            path.append(part)
            parents.append(modules[".".join(parts[:depth])])
    return Site(tuple(path), module, tuple(parents))


def listed(text: str) -> frozenset[str]:
    """The words of a text, for lists of names."""
    return frozenset(text.split())


@lru_cache(maxsize=4096)
def words(name: str) -> tuple[str, ...]:
    """The lower-case words of a snake_case or CamelCase name; digits only part words."""
    return tuple(word.lower() for word in re.findall(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+", name))


def says_attention(name: str) -> bool:
    """Whether a name speaks of attention."""
    return not {"attn", "attention"}.isdisjoint(words(name))


def class_names(module: nn.Module) -> Iterator[str]:
    """The names of the module's class and of its bases, without the subclass that `fully_shard` makes."""
    return (cls.__name__ for cls in type(module).__mro__ if not cls.__name__.startswith("FSDP"))


def class_name(module: nn.Module) -> str:
    """The name of the module's class as its author wrote it."""
    return next(class_names(module))


def is_linear(module: nn.Module) -> bool:
    """Whether the module is a linear layer, by type or by a class name such as ColumnParallelLinear."""
    return isinstance(module, nn.Linear) or any(words(name)[-1:] == ("linear",) for name in class_names(module))


def stores_in_out(module: nn.Module) -> bool:
    """Whether the module is a linear layer whose weight is (in, out): the Conv1D of GPT-2 style models."""
    return "Conv1D" in class_names(module) and hasattr(module, "nf")


def is_convolution(module: nn.Module) -> bool:
    """Whether the module is a convolution, and not a transposed one."""
    return isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
