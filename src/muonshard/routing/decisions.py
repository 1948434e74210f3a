"""What was decided on each parameter, and the table that shows it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from muonshard.routing.rules import Algorithm


@dataclass(frozen=True, slots=True)
class Decision:
    """Where one parameter goes.

    Attributes:
        name: its name in `model.named_parameters()`.
        shape: its global shape.
        algorithm: "muon", "adamw", or "none" for a frozen parameter, which is in no group.
        reason: why, in words.
        options: the matrix options of its group: `num_heads`, `splits`, `split_dim`, `flatten`, `transposed`.
    """

    name: str
    shape: tuple[int, ...]
    algorithm: Algorithm
    reason: str
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)


class ParamGroups(list[dict[str, Any]]):
    """Parameter groups for `muonshard.Muon`, with the decisions that led to them.

    `muonshard.Muon` leaves the groups as they are; torch's own optimizers add their defaults to the dicts they get.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], decisions: tuple[Decision, ...]) -> None:
        super().__init__(groups)
        self.decisions = decisions

    def table(self) -> str:
        """One line per parameter: its name, its global shape, where it goes, and why."""
        rows = [("parameter", "shape", "goes to", "reason")]
        for decision in self.decisions:
            goes_to = {"muon": "Muon", "adamw": "AdamW", "none": "-"}[decision.algorithm]
            shape = " x ".join(map(str, decision.shape)) or "scalar"
            rows.append((decision.name, shape, goes_to, "; ".join((decision.reason, *_told(decision.options)))))
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        lines = ["  ".join((*map(str.ljust, row, widths), row[3])) for row in rows]
        return "\n".join((lines[0], "-" * max(map(len, lines)), *lines[1:]))

    def __str__(self) -> str:
        return self.table()

    def __repr__(self) -> str:
        counts = Counter(decision.algorithm for decision in self.decisions)
        return f"<ParamGroups: {counts['muon']} to Muon, {counts['adamw']} to AdamW, {counts['none']} frozen>"


def _told(options: Mapping[str, Any]) -> list[str]:
    """The matrix options in words, for the table."""
    told = []
    if "splits" in options:
        told.append(f"{('rows', 'columns')[options.get('split_dim', 0)]} {' + '.join(map(str, options['splits']))}")
    if "num_heads" in options:
        count, kind = options["num_heads"], "groups" if options.get("flatten") else "heads"
        told.append(f"{kind} {count if isinstance(count, int) else ' + '.join(map(str, count))}")
    if options.get("transposed"):
        told.append("stored (in, out)")
    return told
