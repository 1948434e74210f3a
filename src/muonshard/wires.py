"""What travels, as buffers: chunks of flags and pieces, stacks of whole matrices, and the arena that they are cut from.

Every chunk on a wire is a run of flags, one per piece, followed by the pieces themselves: on the way out a flag says
whether this rank has a gradient, on the way back whether the update is to be applied. A status word may come first
(see `verdict.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from muonshard._torch import foreach_copy_, group_timeout
from muonshard.meshes import Link
from muonshard.plan import Domain, Piece
from muonshard.verdict import WORD_BYTES

ALIGNMENT = 512
"""Bytes to which buffers in the arena are aligned."""

Carve = Callable[[int], Tensor]
"""Takes a number of elements, gives a flat buffer of them."""


@dataclass(frozen=True)
class Stack:
    """Owned matrices of one kind and shape, (count, rows, cols) in the exchange dtype."""

    kind: Hashable
    jobs: tuple[int, ...]
    tensor: Tensor


class Wire:
    """A flat buffer of chunks, one per peer, in the order of the link's ranks; views of all pieces, of all flags.

    `pieces` and `flags` are in the order of `chunks`: by place in the grid. The chunk of this rank itself is None. Each
    other begins with a status word of `word` elements.
    """

    def __init__(
        self, chunks: Sequence[Sequence[Piece] | None], link: Link | None, carve: Carve, word: int = 0
    ) -> None:
        sizes = [0 if c is None else word + len(c) + sum(piece.where.numel for piece in c) for c in chunks]
        order = link.order if link else range(len(chunks))
        self.splits = [sizes[place] for place in order]
        self.flat = carve(sum(sizes))
        starts = dict(zip(order, accumulate(self.splits, initial=0), strict=False))
        self.pieces: list[Tensor] = []
        self.flags: list[Tensor] = []
        self._words: list[Tensor] = []
        for place, chunk in enumerate(chunks):
            pieces = chunk or ()
            offset = starts[place]
            if chunk is not None and word:
                self._words.append(self.flat[offset : offset + word].view(torch.uint8)[:WORD_BYTES])
                offset += word
            self.flags.append(self.flat[offset : offset + len(pieces)])
            offset += len(pieces)
            for piece in pieces:
                shape = [part.stop - part.start for part in piece.where.local]
                self.pieces.append(self.flat[offset : offset + piece.where.numel].view(shape))
                offset += piece.where.numel

    def write_flags(self, values: Sequence[bool]) -> None:
        """Set the flags of all pieces, in order."""
        if all(values):
            for chunk in self.flags:
                chunk.fill_(1)
            return
        row = torch.tensor(values, dtype=self.flat.dtype).to(self.flat.device)
        foreach_copy_(self.flags, row.split([len(chunk) for chunk in self.flags]))

    def read_flags(self) -> list[bool]:
        """The flags of all pieces, in order; waits for the device."""
        return [bool(flag) for flag in torch.cat(self.flags).tolist()] if self.flags else []

    def write_words(self, word: int) -> None:
        """Set all status words."""
        row = torch.tensor([word], dtype=torch.int32).view(torch.uint8).to(self.flat.device)
        foreach_copy_(self._words, [row] * len(self._words))

    def read_words(self) -> list[int]:
        """The status words; waits for the device."""
        return torch.cat(self._words).cpu().view(torch.int32).tolist() if self._words else []


class Transfer:
    """An exchange on its way, or none: a domain of one rank has no link.

    Every method raises RuntimeError, naming the bucket, if another rank has stopped, or does not answer in time.
    """

    def __init__(self, label: str) -> None:
        self._label = label
        self._works: list[dist.Work] = []
        self._limit: timedelta | None = None

    def deal(self, target: Wire, source: Wire, link: Link | None) -> None:
        """Send each chunk of `source` to one of the link's ranks, and take theirs to `target`: one all-to-all."""
        if link is None:
            return
        with naming(self._label):
            work = dist.all_to_all_single(
                target.flat, source.flat, target.splits, source.splits, group=link.group, async_op=True
            )
        self._works, self._limit = [work], None

    def spread(self, target: Wire, source: Wire, link: Link) -> None:
        """Send all of `source` to each of the link's other ranks, and take theirs to `target`: one batch of sends.

        No collective sends one buffer to all where every rank's is of another size: an all-to-all would need a copy for
        each rank.
        """
        operations: list[dist.P2POp] = []
        for peer, chunk in zip(dist.get_process_group_ranks(link.group), target.flat.split(target.splits), strict=True):
            if peer != dist.get_rank():
                sends = [(dist.isend, source.flat), (dist.irecv, chunk)]
                operations += [dist.P2POp(do, part, peer, link.group) for do, part in sends if len(part)]
        if operations:
            with naming(self._label):
                self._works = dist.batch_isend_irecv(operations)
            # gloo's collectives keep to the group's timeout by themselves, its sends and receives wait for ever
            self._limit = group_timeout(link.group) if source.flat.is_cpu else None

    def is_done(self) -> bool:
        """Whether `wait` would not wait."""
        return all(work.is_completed() for work in self._works)

    def wait(self) -> None:
        """Until what was started has arrived."""
        works, self._works = self._works, []
        with naming(self._label):
            for work in works:
                work.wait(*([] if self._limit is None else [self._limit]))


@contextmanager
def naming(label: str) -> Iterator[None]:
    """Say in the RuntimeError of a process group what was being exchanged."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(f"the exchange of {label} failed; did another rank stop? {error}") from error


def make_stacks(owned: Sequence[int], domain: Domain, carve: Carve) -> tuple[list[Stack], dict[int, Tensor]]:
    """Room for the owned matrices, stacked by kind and shape; and each matrix as its box in the parameter's dims."""
    alike: dict[tuple[Hashable, int, int], list[int]] = {}
    for index in owned:
        job = domain.jobs[index]
        alike.setdefault((job.kind, job.matrix.rows, job.matrix.cols), []).append(index)
    stacks: list[Stack] = []
    boxes: dict[int, Tensor] = {}
    for (kind, rows, cols), members in alike.items():
        stack = carve(len(members) * rows * cols).view(len(members), rows, cols)
        stacks.append(Stack(kind, tuple(members), stack))
        boxes |= {job: row.view(domain.jobs[job].matrix.box_shape) for job, row in zip(members, stack, strict=True)}
    return stacks, boxes


class Slot:
    """A bump allocator over one flat buffer, or, without a buffer, a ruler that only measures."""

    def __init__(self, dtype: torch.dtype, buffer: Tensor | None = None) -> None:
        self._buffer = torch.empty(0, dtype=dtype, device="meta") if buffer is None else buffer
        self._step = ALIGNMENT // dtype.itemsize
        self.used = 0

    def carve(self, numel: int) -> Tensor:
        """The next `numel` elements, aligned."""
        start = self.used
        self.used += -(-numel // self._step) * self._step
        if self._buffer.is_meta:
            return self._buffer.new_empty(numel)
        return self._buffer[start : start + numel]
