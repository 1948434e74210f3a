"""What ranks must agree on, checked once, when a plan is made: a difference is an error on every rank, not a hang."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch.distributed as dist

from muonshard.meshes import this_rank

T = TypeVar("T")


@dataclass
class Circle:
    """Ranks that share parameters, and what this rank says of them.

    Attributes:
        groups: process groups that together reach all of the circle's ranks, in the same order on each.
        claims: (subject, text) for each thing that must be equal on all ranks, in an order that must be equal too.
        problems: what is wrong on this rank, whether the others agree or not.
    """

    groups: Sequence[dist.ProcessGroup]
    claims: list[tuple[str, str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def check(self) -> None:
        """Compare with all ranks of the circle: one small collective per group when all is well.

        Raises:
            ValueError: on every rank, if any rank has a problem or makes another claim; it names the subject and ranks.
        """
        digest = hashlib.sha256(repr(self.claims).encode()).hexdigest()
        notes = self._gather((digest, bool(self.problems)))
        if any(troubled for _, troubled in notes.values()):
            raise ValueError(_describe_problems(self._gather(self.problems)))
        if len({digest for digest, _ in notes.values()}) > 1:
            raise ValueError(_describe_difference(self._gather(self.claims)))

    def _gather(self, value: T) -> dict[int, T]:
        """Every rank's value, by rank."""
        values = {this_rank(): value}
        for group in self.groups:
            gathered: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(gathered, values, group=group)
            values = {rank: value for part in gathered for rank, value in part.items()}
        return values


def _describe_problems(problems: dict[int, list[str]]) -> str:
    ranks: dict[str, list[int]] = {}
    for rank, texts in sorted(problems.items()):
        for text in texts:
            ranks.setdefault(text, []).append(rank)
    if not dist.is_initialized():
        return "; ".join(ranks)
    return "; ".join(f"{text} (on {_name(where)})" for text, where in ranks.items())


def _describe_difference(claims: dict[int, list[tuple[str, str]]]) -> str:
    """The first claim that is not the same everywhere, and who claims what."""
    for position in range(max(map(len, claims.values()))):
        voices: dict[Hashable, list[int]] = {}
        for rank, said in sorted(claims.items()):
            voices.setdefault(said[position] if position < len(said) else None, []).append(rank)
        if len(voices) > 1:
            texts = [f"{_name(ranks)}: {_text(claim)}" for claim, ranks in voices.items()]
            return (
                f"ranks disagree about {_subject(voices)}: {'; '.join(texts)}. "
                "Give every rank the same parameters, in the same order, and the same options"
            )
    raise AssertionError("the claims' digests differ, so the claims do")


def _subject(voices: dict[Hashable, list[int]]) -> str:
    return " / ".join(dict.fromkeys(claim[0] for claim in voices if isinstance(claim, tuple)))


def _text(claim: Any) -> str:
    return "nothing more" if claim is None else f"{claim[0]} {claim[1]}"


def _name(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
