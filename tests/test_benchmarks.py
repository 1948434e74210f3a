"""The benchmark: its counting tools on cases whose bytes, FLOPs and allocations are known, and its way with methods."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from benchmarks import world as worlds
from benchmarks.counting import PeakMemory, count_flops, count_traffic
from benchmarks.measure import RankResult, measure
from benchmarks.methods import Parameters, Steps
from benchmarks.methods.floor import ComputeAlone, share_out
from benchmarks.methods.registry import METHODS, find
from benchmarks.methods.standard import AdamW, GatherEverywhere, TorchMuon, orthogonalized
from benchmarks.problem import MESHES, SETS, Problem, Recipe, Weight, shard_of
from benchmarks.report import rows_of
from benchmarks.world import Case, CaseResult, run_case
from pool import Pool

W = 4
BF16 = torch.bfloat16
ROWS = ((0, 3, 1, 2), (4, 1, 0, 0), (0, 0, 0, 5), (2, 2, 2, 2))  # ROWS[i][j]: rows that rank i sends to rank j


def _counted(call: Callable[[], object]) -> tuple[int, int, dict[str, int]]:
    with count_traffic() as traffic:
        call()
    return traffic.bytes_sent, traffic.collectives, traffic.calls_by_name


def _uneven_all_to_all(asynchronous: bool) -> tuple[int, int, dict[str, int], bool]:
    rank = dist.get_rank()
    sent, received = ROWS[rank], [row[rank] for row in ROWS]
    source = torch.full((sum(sent), 7), float(rank), dtype=BF16)
    target = torch.empty(sum(received), 7, dtype=BF16)

    def call() -> None:
        work = dist.all_to_all_single(target, source, list(received), list(sent), async_op=asynchronous)
        if asynchronous:
            work.wait()

    counts = _counted(call)
    expected = torch.arange(4.0, dtype=BF16).repeat_interleave(torch.tensor(received))
    return *counts, torch.equal(target[:, 0], expected)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_uneven_all_to_all_sends_every_chunk_but_the_ranks_own(pool: Pool, asynchronous: bool) -> None:
    for rank, outcome in enumerate(pool.run(W, _uneven_all_to_all, asynchronous)):
        rows = sum(ROWS[rank]) - ROWS[rank][rank]
        assert outcome == (rows * 7 * 2, 1, {"alltoall_base": 1}, True)


def _each_collective() -> dict[str, int]:
    rank = dist.get_rank()
    x, wide = torch.zeros(12), torch.zeros(W * 12)
    many = [torch.zeros(12) for _ in range(W)]
    root = rank == 1
    calls: dict[str, Callable[[], object]] = {
        "even all_to_all_single": lambda: dist.all_to_all_single(torch.zeros(12), x),
        "all_to_all": lambda: dist.all_to_all(many, [torch.zeros(12) for _ in range(W)]),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(wide, x),
        "all_gather_into_tensor, async": lambda: dist.all_gather_into_tensor(wide, x, async_op=True).wait(),
        "all_gather": lambda: dist.all_gather(many, x),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(torch.zeros(12), wide),
        "all_reduce": lambda: dist.all_reduce(x),
        "broadcast": lambda: dist.broadcast(x, 1),
        "reduce": lambda: dist.reduce(x, 1),
        "gather": lambda: dist.gather(x, many if root else None, dst=1),
        "scatter": lambda: dist.scatter(x, many if root else None, src=1),
        "barrier": lambda: dist.barrier(),
    }
    sent = {}
    for name, call in calls.items():
        sent[name], collectives, _ = _counted(call)
        assert collectives == 1, name
    return sent


def test_each_collective_sends_what_its_bandwidth_optimal_algorithm_sends(pool: Pool) -> None:
    block = 12 * 4
    by_rank = pool.run(W, _each_collective)
    assert {name: [sent[name] for sent in by_rank] for name in by_rank[0]} == {
        "even all_to_all_single": [block * 3 // 4] * W,
        "all_to_all": [block * 3] * W,
        "all_gather_into_tensor": [block * 3] * W,
        "all_gather_into_tensor, async": [block * 3] * W,
        "all_gather": [block * 3] * W,
        "reduce_scatter_tensor": [block * 3] * W,
        "all_reduce": [block * 3 // 2] * W,
        "broadcast": [0, block, block, block],
        "reduce": [block, 0, block, block],
        "gather": [block, 0, block, block],
        "scatter": [0, block * 3, 0, 0],
        "barrier": [0] * W,
    }


def _send_to_the_next() -> tuple[int, int, dict[str, int]]:
    rank = dist.get_rank()
    x, y = torch.zeros(12), torch.zeros(12)

    def call() -> None:
        pair = [dist.P2POp(dist.isend, x, (rank + 1) % W), dist.P2POp(dist.irecv, y, (rank - 1) % W)]
        for work in dist.batch_isend_irecv(pair):
            work.wait()

    return _counted(call)


def test_sends_are_counted_as_bytes_but_not_as_collectives(pool: Pool) -> None:
    assert pool.run(W, _send_to_the_next) == [(12 * 4, 0, {"send": 1, "recv": 1})] * W


def _gather_a_dtensor() -> tuple[tuple[int, int, dict[str, int]], tuple[int, int, dict[str, int]]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    x = distribute_tensor(torch.zeros(8, 6, dtype=BF16), mesh, [Replicate(), Shard(0)])
    y = distribute_tensor(torch.zeros(8, 6, dtype=BF16), mesh, [Shard(0), Shard(1)])
    return _counted(x.full_tensor), _counted(y.full_tensor)


def test_collectives_that_a_dtensor_issues_are_counted_in_their_own_group(pool: Pool) -> None:
    for one_axis, two_axes in pool.run(W, _gather_a_dtensor):
        assert one_axis == (4 * 6 * 2, 1, {"all_gather_into_tensor": 1})
        assert two_axes == ((4 * 3 + 8 * 3) * 2, 2, {"all_gather_into_tensor": 2})


def _multiply_dtensors() -> int:
    mesh = init_device_mesh("cpu", (W,))
    a = distribute_tensor(torch.zeros(8, 6), mesh, [Shard(0)])
    b = distribute_tensor(torch.zeros(6, 10), mesh, [Replicate()])
    with count_flops() as flops, count_traffic() as traffic:
        a @ b
    assert traffic.calls == []
    return flops.total


def test_flops_of_a_dtensor_product_are_those_of_the_local_product(pool: Pool) -> None:
    assert pool.run(W, _multiply_dtensors) == [2 * (8 // W) * 6 * 10] * W


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_flops_count_two_for_each_multiply_add_of_every_kind_of_product(mode: Callable[[], object]) -> None:
    a, b, c = torch.zeros(5, 6), torch.zeros(6, 7), torch.zeros(5, 7)
    with mode(), count_flops() as flops:  # type: ignore[attr-defined]
        a @ b
        torch.addmm(c, a, b, beta=2)
        torch.bmm(a[None].expand(3, 5, 6), b[None].expand(3, 6, 7))
        torch.baddbmm(c, a[None].expand(3, 5, 6), b[None].expand(3, 6, 7))
        a + a
    assert flops.total == 2 * 5 * 6 * 7 * (1 + 1 + 3 + 3)


def test_traffic_inside_flops_and_flops_inside_traffic_count_the_same() -> None:
    a = torch.zeros(4, 4)
    with count_traffic() as outer_traffic, count_flops() as inner_flops:
        a @ a
    with count_flops() as outer_flops, count_traffic() as inner_traffic:
        a @ a
    assert inner_flops.total == outer_flops.total == 2 * 4**3
    assert outer_traffic.calls == inner_traffic.calls == []


def test_peak_memory_is_the_most_alive_at_once_and_leaves_out_what_was_there() -> None:
    old = torch.zeros(1 << 20)
    with PeakMemory() as memory:
        a = torch.zeros(1 << 16)  # 256 KiB
        del a
        b = torch.zeros(1 << 15)  # 128 KiB, kept
        del old  # from before: its bytes are not ours to subtract
        c = b.to(torch.bfloat16).float().double()  # 64 and 128 KiB on the way to 256 KiB
        del c
    assert memory.peak_bytes == (128 + 128 + 256) * 1024
    assert memory.held_bytes == 128 * 1024


def test_peak_memory_sees_what_operators_allocate_for_themselves() -> None:
    x = torch.zeros(1 << 16, dtype=torch.float64)
    with PeakMemory() as memory:
        torch.var(x.view(256, 256).mT.flatten())  # flatten of a transposed view must copy
    assert memory.peak_bytes >= x.numel() * 8
    assert memory.held_bytes == 0


def test_peak_memory_is_measured_afresh_each_time() -> None:
    kept = []
    peaks = []
    for _ in range(3):
        with PeakMemory() as memory:
            kept.append(torch.zeros(1 << 14))
        peaks.append((memory.peak_bytes, memory.held_bytes))
        kept.clear()
    assert peaks == [(1 << 16, 1 << 16)] * 3


WEIGHTS = (Weight((16, 8), "out"), Weight((8, 16), "in"), Weight((10, 6), "out"), Weight((4, 6, 10), "out"))


def _shards_that_differ_from_torchs(kind: str) -> list[str]:
    weights = (*WEIGHTS, Weight((13, 5), "out"), Weight((5, 13), "in"), Weight((2, 5, 3), "in"))
    problem = Problem(weights, MESHES[kind], seed=3)
    wrong = []
    for index, param in enumerate(problem.parameters()):
        whole = param.detach().full_tensor()
        if not torch.equal(problem.local(index, whole), param.detach().to_local()):
            wrong.append(str(weights[index]))
    return wrong


@pytest.mark.parametrize("kind", ["fsdp", "hsdp", "fsdp-tp"])
def test_a_problems_shards_are_those_that_their_placements_say(pool: Pool, kind: str) -> None:
    assert pool.run(W, _shards_that_differ_from_torchs, kind) == [[]] * W


def test_the_parts_of_a_strided_shard_are_what_fsdp_over_tensor_parallelism_holds(pool: Pool) -> None:
    parts = pool.run(W, _rows_held)  # ranks (fsdp, tensor) in row-major order; tensor cuts first
    assert parts == [[0, 1], [4, 5], [2, 3], [6, 7]]


def _rows_held() -> list[int]:
    kind = MESHES["fsdp-tp"]
    mesh = kind.build()
    assert mesh is not None
    return shard_of(torch.arange(8), mesh, kind.placements(Weight((8, 1), "out"))).tolist()


@given(
    st.lists(st.tuples(st.integers(1, 600), st.integers(1, 600)), max_size=40),
    st.integers(1, 6),
)
def test_the_floor_shares_out_every_matrix_once_and_evenly(shapes: list[tuple[int, ...]], ranks: int) -> None:
    shares = share_out(shapes, ranks)
    assert sorted(index for share in shares for index in share) == list(range(len(shapes)))
    costs = [min(s) ** 2 * (2 * max(s) + min(s)) for s in shapes]
    loads = [sum(costs[i] for i in share) for share in shares]
    fair = sum(costs) / ranks
    assert max(loads) <= fair + max(costs, default=0)  # Graham 1966


@dataclass(frozen=True)
class Broken:
    """A method that fails on the ranks named."""

    name: str = "broken"
    is_muon: bool = True
    reference: None = None
    ranks: tuple[int, ...] = (0, 1, 2, 3)

    def prepare(self, params: Parameters, mesh: DeviceMesh | None, recipe: Recipe) -> Steps:
        if dist.get_rank() in self.ranks:
            raise ValueError("it does not work here")
        dist.barrier()
        return torch.optim.SGD(params)


@dataclass(frozen=True)
class BrokenOnOneRank(Broken):
    """A method that leaves three ranks waiting."""

    ranks: tuple[int, ...] = (2,)


def _standard(matrices: list[torch.Tensor], recipe: Recipe) -> None:
    for matrix in matrices:
        orthogonalized(matrix, recipe)


def _measured(kind: str) -> tuple[dict[str, RankResult], dict[str, str | None]]:
    errors: dict[str, str | None] = {}

    def verdict(name: str, error: str | None) -> bool:
        errors[name] = error
        return error is None

    methods = [ComputeAlone("floor", _standard), AdamW(), TorchMuon(), Broken(), GatherEverywhere()]
    weights = [weight for weight in WEIGHTS if len(weight.shape) == 2]
    return measure(methods, Problem(weights, MESHES[kind], seed=1), 2, Recipe(), verdict), errors


@pytest.mark.parametrize("kind", ["fsdp", "hsdp", "fsdp-tp"])
def test_methods_are_counted_timed_and_compared_with_one_process(pool: Pool, kind: str) -> None:
    outcomes = pool.run(W, _measured, kind)
    for results, errors in outcomes:
        assert errors.pop("broken") == "ValueError: it does not work here"
        assert set(errors.values()) == {None}
        assert list(results) == ["floor", "adamw", "torch-muon", "gather-everywhere"]
        assert all(len(result.seconds) == 2 for result in results.values())
        assert results["floor"].difference is None
        assert results["adamw"].difference == 0.0
        for muon in ("torch-muon", "gather-everywhere"):
            assert 0 <= results[muon].difference == results[muon].torch_difference < 2e-3
    ranks = [results for results, _ in outcomes]
    exact = 5 * sum(4 * m * m * n + 2 * m**3 for m, n in ((8, 16), (8, 16), (6, 10)))
    assert sum(rank["floor"].flops for rank in ranks) == exact
    assert [rank["gather-everywhere"].flops for rank in ranks] == [exact] * W
    assert all(rank["adamw"].bytes_sent == 0 for rank in ranks)


def _gathered() -> tuple[int, int]:
    weights = (Weight((16, 8), "out"), Weight((8, 16), "in"))
    result = measure([GatherEverywhere()], Problem(weights, MESHES["fsdp"], 0), 1, Recipe(), lambda name, error: True)
    return result["gather-everywhere"].bytes_sent, result["gather-everywhere"].peak_extra_bytes


def test_gathering_everywhere_sends_its_shards_to_all_others_and_holds_all_matrices(pool: Pool) -> None:
    elements = 2 * 16 * 8
    for sent, extra in pool.run(W, _gathered):
        assert sent == 3 * elements // W * 2
        assert elements * 2 <= extra <= 4 * elements * 4


def test_a_method_that_fails_on_one_rank_only_is_left_out_and_the_others_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worlds, "STRAGGLER_TIMEOUT_S", 1.0)
    result = run_case(Case("small", "fsdp", ("adamw", "test_benchmarks:BrokenOnOneRank"), rounds=1))
    assert list(result.ran) == ["adamw"]
    assert result.failed == {
        "test_benchmarks:BrokenOnOneRank": "ValueError: it does not work here (on some ranks only)"
    }


def _ranks(*seconds: tuple[float, ...]) -> tuple[RankResult, ...]:
    return tuple(RankResult(10 * i, 3, {}, 7, i, 0.5 * i, None, each, each) for i, each in enumerate(seconds))


def test_a_row_takes_the_slowest_rank_of_each_round_and_ratios_within_rounds() -> None:
    case = Case("small", "fsdp", ("a", "b"), rounds=3)
    ran = {"a": _ranks((1.0, 2.0, 4.0), (2.0, 1.0, 3.0)), "b": _ranks((4.0, 2.0, 2.0), (1.0, 1.0, 1.0))}
    a, b = rows_of(CaseResult(case, ran, {}), "a")
    assert (a.milliseconds, a.ratio) == (2000.0, 1.0)
    assert (b.milliseconds, b.ratio) == (2000.0, 1.0)
    assert b.seconds_by_round == (4.0, 2.0, 2.0)
    assert (a.cpu_milliseconds, b.cpu_milliseconds) == (3000.0, 3000.0)
    assert (a.bytes_sent_mean, a.bytes_sent_max, a.flops, a.peak_extra_bytes, a.difference) == (5.0, 10, 14, 1, 0.5)
    assert [row.ratio for row in rows_of(CaseResult(case, ran, {}), "not measured")] == [None, None]


def test_methods_are_found_by_name_and_plugins_by_their_path() -> None:
    assert find("adamw") is METHODS["adamw"]
    assert find("test_benchmarks:Broken").name == "broken"
    with pytest.raises(ValueError, match="no method is called 'adam'; there are "):
        find("adam")


def test_one_process_has_whole_plain_tensors_and_no_mesh() -> None:
    problem = Problem(WEIGHTS, MESHES["alone"], seed=0)
    assert problem.mesh is None
    assert [tuple(param.shape) for param in problem.parameters()] == [weight.shape for weight in WEIGHTS]


@pytest.mark.parametrize(("name", "elements"), [("dense", 24 * (512 + 2048) * 512), ("moe", 64 * 384 * 768)])
def test_the_sets_have_the_sizes_that_are_reported(name: str, elements: int) -> None:
    assert sum(torch.Size(weight.shape).numel() for weight in SETS[name]) == elements
