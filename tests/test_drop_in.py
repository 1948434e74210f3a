"""In one process, Muon in the place of torch.optim.Muon: the same weights, and the habits of any torch optimizer."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import muonshard
from muonshard.orthogonalize import JORDAN, newton_schulz

SHAPES = ((32, 32), (24, 48), (48, 24), (1, 16), (16, 1), (7, 5))
STEPS = 20
pytestmark = pytest.mark.usefixtures("iterates_as_torch_does")


def weights(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def give_gradients(params: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(1000 + step)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)


def train(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], first: int = 0, steps: int = STEPS) -> None:
    for step in range(first, first + steps):
        give_gradients(params, step)
        optimizer.step()


def trained(
    make: Callable[..., torch.optim.Optimizer], dtype: torch.dtype = torch.float32, **options: Any
) -> list[Tensor]:
    params = weights(dtype)
    train(make(params, **options), params)
    return [param.detach() for param in params]


def same(ours: list[Any], theirs: list[Any]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"lr": 0.02, "weight_decay": 0.0},
        {"lr": 0.02, "nesterov": False},
        {"lr": 0.02, "adjust_lr_fn": "original"},
        {"lr": 0.02, "adjust_lr_fn": "match_rms_adamw"},
        {"lr": 0.02, "momentum": 0.0},
        {"lr": 0.02, "momentum": 0.5, "ns_steps": 3, "ns_coefficients": (2.0, -1.5, 0.5), "eps": 1e-3},
        {"lr": 0.02, "ns_steps": 0},
        {"lr": torch.tensor(0.02)},
        {"lr": 0.0},
    ],
    ids=str,
)
def test_twenty_steps_give_the_weights_of_torch(options: dict[str, Any]) -> None:
    assert same(trained(muonshard.Muon, **options), trained(torch.optim.Muon, **options))


def test_weights_are_close_to_those_of_torch_where_the_iteration_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32, and for long matrices by fewer products, as on a CPU that does not multiply bfloat16."""
    monkeypatch.setattr(newton_schulz, "iteration_dtype", lambda device: torch.float32)
    lr, results = 0.02, []
    for make in (muonshard.Muon, torch.optim.Muon):
        generator = torch.Generator().manual_seed(2)
        params = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((80, 200), (200, 80), (64, 512))]
        train(make(params, lr=lr), params)
        results.append(params)
    for ours, theirs in zip(*results, strict=True):
        moved = lr * STEPS * max(1, ours.size(0) / ours.size(1)) ** 0.5 / max(ours.shape) ** 0.5
        assert (ours - theirs).norm() / theirs.numel() ** 0.5 < 0.005 * moved


def test_in_half_precision_weights_differ_from_torch_by_roundings_alone() -> None:
    """torch.optim.Muon rounds the learning rate to bfloat16 too, on CPU: not so here, nor on CUDA."""
    ours, theirs = (trained(make, torch.bfloat16, lr=0.02) for make in (muonshard.Muon, torch.optim.Muon))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=2**-7, atol=2**-9)


def test_weight_decay_is_rounded_once_in_half_precision() -> None:
    """The factor 0.998 is not a bfloat16: rounded first, it would decay twice as fast."""
    param = weights(torch.bfloat16)[0]
    before = param.detach().clone()
    param.grad = torch.zeros_like(param)
    muonshard.Muon([param], lr=0.02, weight_decay=0.1).step()
    assert torch.equal(param, (before.double() * (1 - 0.02 * 0.1)).bfloat16())


def test_momentum_without_nesterov_is_kept_in_half_precision() -> None:
    """torch.optim.Muon divides such a buffer by the norm of the matrix, in place."""
    param = nn.Parameter(torch.zeros(8, 8, dtype=torch.bfloat16))
    param.grad = torch.ones(8, 8, dtype=torch.bfloat16)
    optimizer = muonshard.Muon([param], momentum=0.5, nesterov=False)
    optimizer.step()
    assert (optimizer.state[param]["momentum_buffer"] == 0.5).all()


def test_options_by_place_mean_what_they_mean_in_torch() -> None:
    options = (0.02, 0.05, 0.9, False, (2.0, -1.5, 0.5), 1e-6, 4, "match_rms_adamw")
    ours, theirs = (make(weights(), *options) for make in (muonshard.Muon, torch.optim.Muon))
    for key, value in theirs.defaults.items():
        assert ours.defaults[key] == value


def test_the_defaults_are_those_of_torch() -> None:
    theirs = torch.optim.Muon(weights()).defaults
    assert {key: muonshard.Muon(weights()).defaults[key] for key in theirs} == theirs
    assert theirs["ns_coefficients"] == JORDAN


def test_a_parameter_without_a_gradient_is_left_alone() -> None:
    params = weights()
    before = [param.detach().clone() for param in params]
    optimizer = muonshard.Muon(params, lr=0.1)
    give_gradients(params, 0)
    params[2].grad = None
    optimizer.step()
    changed = [not torch.equal(param, value) for param, value in zip(params, before, strict=True)]
    assert changed == [index != 2 for index in range(len(params))]


def test_gradients_are_not_written_to() -> None:
    params = weights()
    give_gradients(params, 0)
    before = [param.grad.clone() for param in params if param.grad is not None]
    muonshard.Muon(params, lr=0.1).step()
    assert same([param.grad for param in params], before)


@pytest.mark.parametrize(
    "make_scheduler",
    [
        lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5),
        lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
        lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=25),
    ],
    ids=["cosine", "lambda", "one cycle, momentum too"],
)
@pytest.mark.parametrize("lr", [0.05, torch.tensor(0.05)], ids=["number", "tensor"])
def test_schedulers_steer_it(make_scheduler: Callable[[torch.optim.Optimizer], Any], lr: float | Tensor) -> None:
    results = []
    for make in (muonshard.Muon, torch.optim.Muon):
        params = weights()
        optimizer = make(params, lr=copy.deepcopy(lr))
        scheduler = make_scheduler(optimizer)
        for step in range(5):
            train(optimizer, params, step, 1)
            scheduler.step()
        results.append(params)
    assert same(*results)


def test_zero_grad_clears_all_gradients() -> None:
    params = weights()
    optimizer = muonshard.Muon(params)
    give_gradients(params, 0)
    optimizer.zero_grad(set_to_none=False)
    assert all(param.grad is not None and not param.grad.any() for param in params)
    optimizer.zero_grad()
    assert all(param.grad is None for param in params)


def test_a_closure_is_run_with_gradients_and_its_loss_returned() -> None:
    weight = nn.Parameter(torch.ones(3, 4))
    optimizer = muonshard.Muon([weight], lr=0.1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == 12.0
    assert not torch.equal(weight, torch.ones(3, 4))
    assert optimizer.step() is None


def saved_and_loaded(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Its state dict, by way of a file."""
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    return torch.load(file)


def test_a_run_that_is_saved_and_loaded_goes_on_as_if_nothing_had_happened() -> None:
    unbroken = trained(muonshard.Muon, lr=0.02)
    params = weights()
    optimizer = muonshard.Muon(params, lr=0.02)
    train(optimizer, params, 0, 8)
    resumed = [nn.Parameter(param.detach().clone()) for param in params]
    fresh = muonshard.Muon(resumed, lr=0.5, momentum=0.1)
    fresh.load_state_dict(saved_and_loaded(optimizer))
    train(fresh, resumed, 8, STEPS - 8)
    assert same(resumed, unbroken)


def test_the_state_of_torchs_muon_can_be_loaded() -> None:
    params = weights()
    theirs = torch.optim.Muon(params, lr=0.02)
    train(theirs, params, 0, 8)
    resumed = [nn.Parameter(param.detach().clone()) for param in params]
    ours = muonshard.Muon(resumed)
    ours.load_state_dict(saved_and_loaded(theirs))
    train(ours, resumed, 8, STEPS - 8)
    assert same(resumed, trained(torch.optim.Muon, lr=0.02))


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))], ids=["copy", "pickle"]
)
def test_a_copy_goes_on_like_the_original(copied: Callable[[Any], Any]) -> None:
    params = weights()
    optimizer = muonshard.Muon(params, lr=0.02, bucket_bytes=1 << 12, exchange_dtype=torch.float32, nonfinite="skip")
    train(optimizer, params, 0, 3)
    other_params, other = copied((params, optimizer))
    train(optimizer, params, 3, 3)
    train(other, other_params, 3, 3)
    assert same(other_params, params)
    assert len(other.plan.domains[0].buckets) == len(optimizer.plan.domains[0].buckets)
    assert other.plan.itemsize == optimizer.plan.itemsize == 4
    assert other.skipped == optimizer.skipped


def test_a_group_added_mid_run_joins_and_the_others_keep_their_momentum() -> None:
    results = []
    for make in (muonshard.Muon, torch.optim.Muon):
        params = weights()
        optimizer = make(params[:3], lr=0.02)
        train(optimizer, params[:3], 0, 4)
        optimizer.add_param_group({"params": params[3:], "lr": 0.1, "nesterov": False})
        train(optimizer, params, 4, 4)
        results.append(params)
    assert same(*results)


def test_a_step_that_failed_leaves_the_next_one_whole() -> None:
    """Every matrix is orthogonalised in the step after, and none twice."""
    seen: list[int] = []

    def fail_once(stack: Tensor) -> Tensor:
        seen.append(len(stack))
        if len(seen) == 3:
            raise MemoryError
        return stack

    params = weights()
    optimizer = muonshard.Muon(params, lr=0.02, bucket_bytes=1, orthogonalize=fail_once)
    give_gradients(params, 0)
    with pytest.raises(MemoryError):
        optimizer.step()
    seen[:] = [0] * 3
    before = [param.detach().clone() for param in params]
    train(optimizer, params, 1, 1)
    assert seen == [0] * 3 + [1] * len(params)
    assert not any(torch.equal(param, value) for param, value in zip(params, before, strict=True))


def test_options_changed_mid_run_count_from_the_next_step() -> None:
    results = []
    for make in (muonshard.Muon, torch.optim.Muon):
        params = weights()
        optimizer = make(params, lr=0.02)
        train(optimizer, params, 0, 3)
        optimizer.param_groups[0] |= {"ns_steps": 2, "adjust_lr_fn": "match_rms_adamw", "momentum": 0.3, "lr": 0.1}
        train(optimizer, params, 3, 3)
        results.append(params)
    assert same(*results)


def test_parameters_replaced_in_their_group_are_the_ones_that_move() -> None:
    params, replaced = weights(), weights()
    optimizer = muonshard.Muon(params, lr=0.02)
    train(optimizer, params, 0, 1)
    optimizer.param_groups[0]["params"] = replaced
    before = [param.detach().clone() for param in params]
    train(optimizer, replaced, 0, 1)
    assert same(params, before)
    assert same(replaced, before)


def test_named_parameters_keep_their_names() -> None:
    model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Linear(8, 4, bias=False))
    optimizer = muonshard.Muon(model.named_parameters(), lr=0.02)
    assert [tenant.name for tenant in optimizer.plan.tenants] == ["0.weight", "1.weight"]
    assert optimizer.state_dict()["param_groups"][0]["param_names"] == ["0.weight", "1.weight"]


def test_hooks_run_before_and_after_a_step_once_each() -> None:
    params = weights()
    optimizer = muonshard.Muon([{"params": params[:4]}, {"params": params[4:], "algorithm": "adamw"}])
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    optimizer.register_state_dict_post_hook(lambda *_: calls.append("saved"))
    optimizer.register_load_state_dict_post_hook(lambda *_: calls.append("loaded"))
    train(optimizer, params, 0, 1)
    optimizer.load_state_dict(optimizer.state_dict())
    assert calls == ["before", "after", "saved", "loaded"]


def test_its_text_names_the_class_and_its_options() -> None:
    text = repr(muonshard.Muon(weights(), lr=0.02))
    assert text.startswith("Muon (")
    assert "lr: 0.02" in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -0.1}, "lr must be >= 0, got -0.1"),
        ({"lr": float("nan")}, "lr must be >= 0, got nan"),
        ({"lr": torch.ones(2)}, "a tensor lr must have one element"),
        ({"momentum": -1.0}, "momentum must be >= 0"),
        ({"weight_decay": -1.0}, "weight_decay must be >= 0"),
        ({"adjust_lr_fn": "other"}, "adjust_lr_fn must be None, 'original' or 'match_rms_adamw', got 'other'"),
        ({"ns_steps": 100}, "ns_steps must be at least 0 and below 100, got 100"),
        ({"ns_coefficients": (1.0, 2.0)}, "ns_coefficients must be three numbers"),
        ({"exchange_dtype": torch.int32}, "exchange_dtype must be a floating point dtype, got torch.int32"),
        ({"bucket_bytes": 0}, "bucket_bytes must be positive, got 0"),
        ({"nonfinite": "ignore"}, "nonfinite must be 'propagate', 'skip' or 'raise'"),
        ({"exchange": "ring"}, "exchange must be 'auto', 'owner' or 'allgather', got 'ring'"),
        ({"orthogonalize": "svd"}, "orthogonalize='svd' is unknown"),
    ],
    ids=str,
)
def test_an_option_out_of_range_is_an_error_that_names_it(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        muonshard.Muon(weights(), **options)


@pytest.mark.parametrize(
    ("param", "message"),
    [
        (torch.zeros(4), r"bad cannot be read as matrices: shape \(4,\) has no matrices: route it to AdamW"),
        (torch.zeros(2, 2, 2, 2), "bad cannot be read as matrices: .*flatten=True"),
        (torch.zeros(4, 4, dtype=torch.complex64), "bad has dtype torch.complex64: Muon takes real floating point"),
        (torch.zeros(4, 4).to_sparse(), "bad has layout torch.sparse_coo: Muon takes dense parameters"),
    ],
    ids=["vector", "kernel", "complex", "sparse"],
)
def test_a_parameter_that_is_no_matrix_is_an_error_that_names_it(param: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        muonshard.Muon([("good", nn.Parameter(torch.zeros(3, 3))), ("bad", nn.Parameter(param))])


def test_a_group_that_is_refused_leaves_the_optimizer_as_it_was() -> None:
    params = weights()
    optimizer = muonshard.Muon(params[:2], lr=0.02)
    for refused in ({"params": [nn.Parameter(torch.zeros(4))]}, {"params": params[2:], "lr": -1.0}):
        with pytest.raises(ValueError, match=r"no matrices|lr must be"):
            optimizer.add_param_group(refused)
    assert len(optimizer.param_groups) == 1
    train(optimizer, params[:2], 0, 1)


def test_importing_it_brings_in_nothing_that_torch_does_not() -> None:
    """Modules outside the standard library that are there after `import muonshard`, but not after what torch needs."""
    script = """
        import sys, numpy, torch, torch.distributed, torch.distributed.tensor
        before = {name.partition(".")[0] for name in sys.modules}
        import muonshard
        after = {name.partition(".")[0] for name in sys.modules}
        print(sorted(after - before - set(sys.stdlib_module_names)))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['muonshard']"
