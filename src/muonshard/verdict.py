"""What becomes of a step in which matrices are not finite: nonfinite="raise".

An owner that finds one tells the others by a status word: 1 + the matrix's number in its domain, 0 where all is well.
Words ride in chunks that travel anyway, and the smallest wins, so that all ranks of a domain name the same matrix.
"""

from __future__ import annotations

from dataclasses import dataclass

from muonshard.plan import Domain, Plan

WORD_BYTES = 4
ELSEWHERE = 2**31 - 1
"""The word of a rank on which a domain that came before has failed."""


@dataclass
class Verdict:
    """The status word of one domain in one step, as far as this rank has heard."""

    word: int = 0

    def hear(self, *words: int) -> None:
        """Take up what this rank has found, or what others say."""
        self.word = min((word for word in (self.word, *words) if word), default=0)

    def pronounce(self, domain: Domain, plan: Plan) -> list[str]:
        """What is wrong, in words, if anything; the next step starts afresh."""
        word, self.word = self.word, 0
        if not word:
            return []
        if word == ELSEWHERE:
            return ["a matrix on another mesh became infinite or NaN: the ranks of that mesh name it"]
        name = plan.tenants[domain.jobs[word - 1].tenant].name
        return [
            f"{name} became infinite or NaN, in its gradient, its momentum or the exchange dtype: its weights and "
            "momentum are as they were, all other parameters have been updated"
        ]


def word_elements(itemsize: int) -> int:
    """How many elements of `itemsize` bytes a status word takes."""
    return max(1, WORD_BYTES // itemsize)
