"""The matrices inside one parameter.

Muon orthogonalises matrices, and a parameter may hold several: the experts of a stack, the heads of a projection, the
Q, K and V of a fused one. Each matrix is a box of the global tensor whose elements, in row-major order, are a
(rows, cols) matrix.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

from muonshard.layout import Box


@dataclass(frozen=True, slots=True)
class Matrix:
    """One matrix of a parameter: `box` of the global tensor, read in row-major order as (rows, cols)."""

    box: Box
    rows: int
    cols: int

    @property
    def box_shape(self) -> tuple[int, ...]:
        """The shape of the box in the tensor's own dims."""
        return tuple(stop - start for start, stop in self.box)

    @property
    def numel(self) -> int:
        """The number of elements."""
        return self.rows * self.cols


@dataclass(frozen=True, slots=True)
class MatrixRule:
    """How a parameter is read as matrices.

    Attributes:
        splits: sizes of the blocks that dim `split_dim` of each matrix is cut into (fused QKV, gate-up); () for none.
        num_heads: how many equal matrices each block is cut into along `split_dim`: one number for all blocks, or one
            for each entry of `splits`.
        split_dim: 0 cuts rows, 1 columns, of the matrix as stored.
        flatten: read (out, *rest) as (out, prod(rest)): convolutions. Otherwise the leading dim of a 3-D tensor is a
            stack of matrices: experts.
        transposed: the matrix is stored (in, out), not (out, in). Only the learning rate's adjustment depends on it.
    """

    splits: tuple[int, ...] = ()
    num_heads: int | tuple[int, ...] = 1
    split_dim: int = 0
    flatten: bool = False
    transposed: bool = False


def find_matrices(shape: tuple[int, ...], rule: MatrixRule) -> tuple[Matrix, ...]:
    """The matrices of a tensor of `shape`, which together cover it, in row-major order of their boxes.

    Raises:
        ValueError: the shape cannot be read as matrices by this rule; the message says what to do.
    """
    if len(shape) < 2:
        raise ValueError(f"shape {shape} has no matrices: route it to AdamW (algorithm='adamw')")
    if rule.split_dim not in (0, 1):
        raise ValueError(f"split_dim is 0 (rows) or 1 (columns), got {rule.split_dim}")
    if len(shape) == 2 or rule.flatten:
        stack: list[Box] = [()]
    elif len(shape) == 3:
        stack = [((index, index + 1),) for index in range(shape[0])]
    else:
        raise ValueError(f"shape {shape} is not a matrix or a stack of matrices: flatten=True reads it as (out, rest)")
    lead_dims = len(stack[0]) if stack else 0
    base = tuple((0, size) for size in shape[lead_dims:])
    matrices = (_matrix((*lead, *box), len(lead)) for lead in stack for box in _split(base, rule))
    return tuple(matrix for matrix in matrices if matrix.numel > 0)


def _matrix(box: Box, lead: int) -> Matrix:
    """The matrix in `box`, whose rows are the dim after `lead` stack dims and whose columns are all dims after that."""
    sizes = [stop - start for start, stop in box[lead:]]
    return Matrix(box, sizes[0], math.prod(sizes[1:]))


def _split(base: Box, rule: MatrixRule) -> list[Box]:
    """`base` cut along `split_dim` at the edges of blocks and heads."""
    edges = block_edges(base[rule.split_dim][1], rule)
    if len(edges) == 2:
        return [base]
    if rule.split_dim == 1 and len(base) > 2:
        raise ValueError("a flattened tensor is split by rows only: split_dim=0")
    before, after = base[: rule.split_dim], base[rule.split_dim + 1 :]
    return [(*before, edge, *after) for edge in pairwise(edges)]


def block_edges(size: int, rule: MatrixRule) -> list[int]:
    """Where a dim of `size` is cut by the rule's blocks and heads, from 0 to `size`.

    Raises:
        ValueError: blocks do not add up to `size`, or heads do not divide a block.
    """
    splits = rule.splits or (size,)
    heads = (rule.num_heads,) * len(splits) if isinstance(rule.num_heads, int) else rule.num_heads
    if sum(splits) != size or (min(splits) < 1 and size > 0):
        raise ValueError(f"splits {splits} must be positive and add up to the size of dim {rule.split_dim}, {size}")
    if len(heads) != len(splits):
        raise ValueError(f"num_heads {heads} needs one entry for each of the splits {splits}")
    edges = [0]
    for block, count in zip(splits, heads, strict=True):
        if count < 1 or block % count:
            raise ValueError(f"num_heads={count} does not divide a block of {block} along dim {rule.split_dim}")
        edges += [edges[-1] + block // count * (head + 1) for head in range(count)]
    return edges
