"""What ranks must agree on, checked once, when a plan is made: a difference is an error on every rank, not a hang."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from muonshard.meshes import this_rank

T = TypeVar("T")

HOPS = 2
"""From how many circles away a rank hears of trouble: circles along the axes of one mesh are at most that far apart."""


@dataclass
class Circle:
    """Ranks that share parameters, and what this rank says of them.

    Attributes:
        groups: process groups that together reach all of the circle's ranks, in the same order on each; none if this
            rank is alone in it.
        claims: (subject, text) for each thing that must be equal on all ranks, in an order that must be equal too.
        problems: what is wrong on this rank, whether the others agree or not.
    """

    groups: Sequence[dist.ProcessGroup]
    claims: list[tuple[str, str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def compare(self) -> list[str]:
        """What is wrong on some rank or not the same on all, with the ranks: nothing, or the same text on every rank.

        One small collective per group when all is well.
        """
        digest = hashlib.sha256(repr(self.claims).encode()).hexdigest()
        notes = self.gather((digest, bool(self.problems)))
        if any(troubled for _, troubled in notes.values()):
            return [_describe_problems(self.gather(self.problems))]
        if len({digest for digest, _ in notes.values()}) > 1:
            return [_describe_difference(self.gather(self.claims))]
        return []

    def gather(self, value: T) -> dict[int, T]:
        """Every rank's value, by rank.

        Raises:
            RuntimeError: ranks of the circle did not come in the time that their process group allows.
        """
        values = {this_rank(): value}
        for group in self.groups:
            gathered: list[Any] = [None] * dist.get_world_size(group)
            try:
                dist.all_gather_object(gathered, values, group=group)
            except RuntimeError as error:
                raise RuntimeError(
                    f"{name_ranks(dist.get_process_group_ranks(group))} could not compare their parameters: each "
                    f"must give its part of {self.claims[-1][0]} to the optimizer, and make it when the others do. "
                    f"{error}"
                ) from error
            values = {rank: value for part in gathered for rank, value in part.items()}
        return values


def check(circles: Sequence[Circle]) -> None:
    """Compare within every circle of this rank; then let circles that share ranks hear of each other's trouble.

    Any two ranks must have their common circles in the same order.

    Raises:
        ValueError: on every rank of a circle in which, or near which, a rank has a problem or makes another claim; it
            names the subject and the ranks.
    """
    troubles = spread(circles, [trouble for circle in circles for trouble in circle.compare()])
    if troubles:
        raise ValueError("; ".join(troubles))


def spread(circles: Sequence[Circle], troubles: list[str]) -> list[str]:
    """The troubles of this rank and of all that it shares a circle with, or that those do; in the same order on all."""
    for _ in range(HOPS):
        for circle in circles:
            troubles = list(dict.fromkeys(text for heard in circle.gather(troubles).values() for text in heard))
    return troubles


def text_of(value: object) -> str:
    """`repr`, but the same in every process and on every device: for numbers in tensors, and objects without a text."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return repr(value.item())
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))


def _describe_problems(problems: dict[int, list[str]]) -> str:
    ranks: dict[str, list[int]] = {}
    for rank, texts in sorted(problems.items()):
        for text in texts:
            ranks.setdefault(text, []).append(rank)
    if not dist.is_initialized():
        return "; ".join(ranks)
    return "; ".join(f"{text} (on {name_ranks(where)})" for text, where in ranks.items())


def _describe_difference(claims: dict[int, list[tuple[str, str]]]) -> str:
    """The first claim that is not the same everywhere, and who claims what."""
    for position in range(max(map(len, claims.values()))):
        voices: dict[Hashable, list[int]] = {}
        for rank, said in sorted(claims.items()):
            voices.setdefault(said[position] if position < len(said) else None, []).append(rank)
        if len(voices) > 1:
            texts = [f"{name_ranks(ranks)}: {_text(claim)}" for claim, ranks in voices.items()]
            return (
                f"ranks disagree about {_subject(voices)}: {'; '.join(texts)}. "
                "Give every rank the same parameters, in the same order, and the same options"
            )
    raise AssertionError("the claims' digests differ, so the claims do")


def _subject(voices: dict[Hashable, list[int]]) -> str:
    return " / ".join(dict.fromkeys(claim[0] for claim in voices if isinstance(claim, tuple)))


def _text(claim: Any) -> str:
    return "nothing more" if claim is None else f"{claim[0]} {claim[1]}"


def name_ranks(ranks: Sequence[int]) -> str:
    """What messages call some ranks."""
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
