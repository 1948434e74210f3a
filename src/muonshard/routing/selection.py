"""Parameters that the caller names, by globs and functions."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase

from torch import nn

from muonshard.routing.places import Place

Selector = str | Callable[[str, nn.Parameter], bool]


class Selection:
    """The parameters that `include` or `exclude` names, and by what."""

    def __init__(
        self,
        argument: str,
        selectors: Selector | Iterable[Selector],
        named: Mapping[str, nn.Parameter],
        aliases: Mapping[str, list[Place]],
    ) -> None:
        self._argument = argument
        self._matched: dict[str, str] = {}
        several = [selectors] if isinstance(selectors, str) or callable(selectors) else list(selectors)
        for selector in several:
            if not isinstance(selector, str) and not callable(selector):
                raise TypeError(f"{argument} takes globs and functions of (name, parameter), got {selector!r}")
            matched = [name for name, parameter in named.items() if _selects(selector, name, parameter, aliases[name])]
            if isinstance(selector, str) and not matched:
                raise ValueError(_no_match(argument, selector, aliases))
            label = selector if isinstance(selector, str) else getattr(selector, "__name__", "a function")
            for name in matched:
                self._matched.setdefault(name, label)

    def why(self, name: str) -> str | None:
        """The reason if the parameter is named, otherwise None."""
        return f"named by {self._argument} ({self._matched[name]})" if name in self._matched else None


def _selects(selector: Selector, name: str, parameter: nn.Parameter, where: list[Place]) -> bool:
    if not isinstance(selector, str):
        return bool(selector(where[0].name, parameter))
    return any(fnmatchcase(alias, selector) for alias in {name, *(place.name for place in where)})


def _no_match(argument: str, glob: str, aliases: Mapping[str, list[Place]]) -> str:
    names = [place.name for where in aliases.values() for place in where]
    close = [name for name in names if glob.strip("*.") and glob.strip("*.") in name][:3]
    close = close or difflib.get_close_matches(glob, names, n=3, cutoff=0.4)
    hint = f"close matches: {', '.join(close)}" if close else f"names look like {', '.join(names[:3])}"
    return f"{argument}={glob!r} matches no parameter; {hint}. A glob must match a whole name: use * at its ends"
