"""The matrices of a parameter cover it exactly, in the order in which it is stored, whatever the rule."""

from __future__ import annotations

from itertools import pairwise
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from muonshard.layout import Box
from muonshard.matrices import MatrixRule, block_edges, find_matrices

Shape = tuple[int, ...]


def inside(box: Box) -> tuple[slice, ...]:
    return tuple(slice(*span) for span in box)


@st.composite
def rules(draw: st.DrawFn) -> tuple[Shape, MatrixRule]:
    """A tensor and a rule that reads it: blocks of heads along rows or columns, stacks, and flattened kernels."""
    heads = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    blocks = tuple(count * draw(st.integers(1, 3)) for count in heads)
    flatten = draw(st.booleans())
    split_dim = 0 if flatten else draw(st.sampled_from([0, 1]))
    other = draw(st.integers(1, 4))
    matrix = (sum(blocks), other) if split_dim == 0 else (other, sum(blocks))
    if flatten:
        shape = (matrix[0], *draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    else:
        shape = draw(st.sampled_from([matrix, (3, *matrix), (1, *matrix)]))
    return shape, MatrixRule(blocks, tuple(heads), split_dim, flatten)


@given(rules())
def test_matrices_cover_the_tensor_once(drawn: tuple[Shape, MatrixRule]) -> None:
    shape, rule = drawn
    covered = np.zeros(shape, int)
    for matrix in find_matrices(shape, rule):
        covered[inside(matrix.box)] += 1
    assert (covered == 1).all()


@given(rules())
def test_a_matrix_has_as_many_rows_and_columns_as_its_box(drawn: tuple[Shape, MatrixRule]) -> None:
    shape, rule = drawn
    lead = 0 if len(shape) == 2 or rule.flatten else 1
    for matrix in find_matrices(shape, rule):
        box_shape = np.empty(shape)[inside(matrix.box)].shape
        assert matrix.box_shape == box_shape
        assert matrix.numel == prod(box_shape)
        assert box_shape[:lead] == (1,) * lead
        assert (matrix.rows, matrix.cols) == (box_shape[lead], prod(box_shape[lead + 1 :]))


@given(rules())
def test_matrices_come_in_the_order_in_which_they_are_stored(drawn: tuple[Shape, MatrixRule]) -> None:
    boxes = [matrix.box for matrix in find_matrices(*drawn)]
    assert boxes == sorted(boxes)


@given(rules())
def test_the_matrices_of_a_dim_are_its_blocks_cut_into_equal_heads(drawn: tuple[Shape, MatrixRule]) -> None:
    _, rule = drawn
    assert isinstance(rule.num_heads, tuple)
    sizes = [stop - start for start, stop in pairwise(block_edges(sum(rule.splits), rule))]
    expected = [block // heads for block, heads in zip(rule.splits, rule.num_heads, strict=True) for _ in range(heads)]
    assert sizes == expected


def test_one_number_of_heads_holds_for_every_block() -> None:
    assert block_edges(12, MatrixRule((8, 4), 2)) == block_edges(12, MatrixRule((8, 4), (2, 2))) == [0, 4, 8, 10, 12]


def test_without_a_rule_a_parameter_is_one_matrix_and_a_stack_one_for_each_entry() -> None:
    assert [(m.box, m.rows, m.cols) for m in find_matrices((4, 6), MatrixRule())] == [(((0, 4), (0, 6)), 4, 6)]
    stack = [(m.box, m.rows, m.cols) for m in find_matrices((2, 4, 6), MatrixRule())]
    assert stack == [(((0, 1), (0, 4), (0, 6)), 4, 6), (((1, 2), (0, 4), (0, 6)), 4, 6)]


def test_a_flattened_kernel_is_one_matrix_of_output_rows() -> None:
    assert [(m.rows, m.cols) for m in find_matrices((8, 3, 5, 5), MatrixRule(flatten=True))] == [(8, 75)]


def test_grouped_queries_keys_and_values_become_their_heads() -> None:
    rule = MatrixRule(splits=(8, 4, 4), num_heads=(4, 2, 2))
    assert [m.box[0] for m in find_matrices((16, 6), rule)] == [(2 * head, 2 * head + 2) for head in range(8)]


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0), (0, 4, 4), (3, 0, 4)])
def test_a_tensor_of_no_elements_has_no_matrices(shape: Shape) -> None:
    assert find_matrices(shape, MatrixRule()) == ()


@pytest.mark.parametrize(
    ("shape", "rule", "message"),
    [
        ((5,), MatrixRule(), r"shape \(5,\) has no matrices: route it to AdamW"),
        ((), MatrixRule(), "has no matrices"),
        ((2, 3, 4, 5), MatrixRule(), "flatten=True reads it as"),
        ((4, 4), MatrixRule(split_dim=2), r"split_dim is 0 \(rows\) or 1 \(columns\), got 2"),
        ((4, 4), MatrixRule(split_dim=-1), "split_dim is 0"),
        ((6, 4), MatrixRule(splits=(2, 3)), r"splits \(2, 3\) must be positive and add up to the size of dim 0, 6"),
        ((6, 4), MatrixRule(splits=(8, -2)), r"splits \(8, -2\) must be positive"),
        ((6, 4), MatrixRule(splits=(6, 0)), "must be positive"),
        ((6, 4), MatrixRule(splits=(4,), split_dim=1, num_heads=3), "num_heads=3 does not divide a block of 4"),
        ((6, 4), MatrixRule(num_heads=4), "num_heads=4 does not divide a block of 6 along dim 0"),
        ((6, 4), MatrixRule(num_heads=0), "num_heads=0 does not divide"),
        ((6, 4), MatrixRule(num_heads=-1), "num_heads=-1 does not divide"),
        ((6, 4), MatrixRule(splits=(2, 4), num_heads=(1,)), r"num_heads \(1,\) needs one entry for each of the splits"),
        ((6, 4, 3), MatrixRule(flatten=True, split_dim=1, num_heads=2), "split by rows only: split_dim=0"),
    ],
)
def test_a_rule_that_does_not_fit_is_an_error_that_says_why(shape: Shape, rule: MatrixRule, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find_matrices(shape, rule)
