"""The matrices inside known modules."""

from __future__ import annotations

import pytest
from torch import nn

from muonshard.routing import param_groups
from routing_models import GPT, Holder, MoE, SelfAttention, decided


def test_nothing_is_split_unless_asked() -> None:
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(8, 2), "lstm": nn.LSTM(4, 4), "gpt": GPT(), "moe": MoE()})
    assert all(not decision.options for decision in param_groups(model).decisions)


def test_the_fused_projection_of_multihead_attention_is_q_k_and_v_by_heads() -> None:
    model = nn.ModuleDict({"layer": nn.TransformerEncoderLayer(12, 3, 20)})
    found = decided(param_groups(model, split_known=True))
    fused = found["layer.self_attn.in_proj_weight"].options
    assert fused == {"splits": (12, 12, 12), "num_heads": 3, "split_dim": 0}
    assert found["layer.self_attn.out_proj.weight"].options == {"num_heads": 3, "split_dim": 1}
    assert found["layer.linear1.weight"].options == found["layer.linear2.weight"].options == {}


def test_only_what_is_asked_for_is_split() -> None:
    name = "in_proj_weight"
    attention = nn.MultiheadAttention(12, 3)
    assert decided(param_groups(attention, split_known={"fused"}))[name].options == {
        "splits": (12, 12, 12),
        "split_dim": 0,
    }
    assert decided(param_groups(attention, split_known={"heads"}))[name].options == {"num_heads": 9, "split_dim": 0}
    assert decided(param_groups(attention, split_known={"transposed"}))[name].options == {}


def test_separate_projections_of_unequal_inputs_are_split_by_heads() -> None:
    found = decided(param_groups(nn.MultiheadAttention(8, 2, kdim=6, vdim=10), split_known=True))
    for name in ("q_proj_weight", "k_proj_weight", "v_proj_weight"):
        assert found[name].options == {"num_heads": 2, "split_dim": 0}


def test_grouped_query_attention_has_fewer_heads_in_k_and_v() -> None:
    found = decided(param_groups(GPT(dim=16), split_known=True))
    fused = found["blocks.0.attn.wqkv.weight"].options
    assert fused == {"splits": (16, 8, 8), "num_heads": (4, 2, 2), "split_dim": 0}
    assert found["blocks.0.attn.wo.weight"].options == {"num_heads": 4, "split_dim": 1}


def test_head_counts_of_one_tensor_parallel_rank_do_not_mislead() -> None:
    attention = SelfAttention(16, heads=4, kv_heads=2)
    attention.n_heads, attention.n_kv_heads = 2, 1  # what a model divides by the tensor-parallel degree
    options = decided(param_groups(nn.ModuleDict({"attn": attention}), split_known=True))["attn.wqkv.weight"].options
    assert options == {"splits": (16, 8, 8), "num_heads": (4, 2, 2), "split_dim": 0}


def test_an_attention_module_alone_is_split_too() -> None:
    found = decided(param_groups(SelfAttention(16, heads=4, kv_heads=2), split_known=True))
    assert found["wqkv.weight"].options["splits"] == (16, 8, 8)


def test_without_head_counts_q_k_and_v_are_as_wide_as_the_input() -> None:
    attention = SelfAttention(16, heads=4, kv_heads=4)
    del attention.n_heads, attention.n_kv_heads
    found = decided(param_groups(attention, split_known=True))
    assert found["wqkv.weight"].options == {"splits": (16, 16, 16), "num_heads": 4, "split_dim": 0}


def test_a_configuration_that_refuses_to_answer_is_passed_over() -> None:
    class Refusing:
        @property
        def num_key_value_heads(self) -> int:
            raise RuntimeError("differs from layer to layer")

    attention = SelfAttention(16, heads=4, kv_heads=4)
    del attention.n_kv_heads
    attention.config = Refusing()
    assert decided(param_groups(attention, split_known=True))["wqkv.weight"].options["splits"] == (16, 16, 16)


def test_sizes_that_do_not_agree_are_not_split() -> None:
    attention = SelfAttention(16, heads=4, kv_heads=2)
    attention.wqkv = nn.Linear(16, 35)
    assert decided(param_groups(attention, split_known=True))["wqkv.weight"].options == {}


def test_gates_of_recurrent_layers_and_fused_gate_up_are_matrices_of_their_own() -> None:
    model = nn.ModuleDict({"lstm": nn.LSTM(5, 3), "gru": nn.GRUCell(5, 3), "gate_up_proj": nn.Linear(4, 14)})
    found = decided(param_groups(model, split_known=True))
    assert found["lstm.weight_ih_l0"].options["splits"] == (3, 3, 3, 3)
    assert found["gru.weight_hh"].options["splits"] == (3, 3, 3)
    assert found["gate_up_proj.weight"].options["splits"] == (7, 7)


def test_experts_stored_in_out_are_known_by_the_shapes_of_gate_up_and_down() -> None:
    for transposed in (False, True):
        gate_up, down = ((4, 6, 20), (4, 10, 6)) if transposed else ((4, 20, 6), (4, 6, 10))
        model = nn.ModuleDict({"experts": Holder(gate_up_proj=gate_up, down_proj=down)})
        found = decided(param_groups(model, split_known=True))
        assert found["experts.gate_up_proj"].options.get("transposed", False) is transposed
        assert found["experts.down_proj"].options.get("transposed", False) is transposed
        assert found["experts.gate_up_proj"].options["splits"] == (10, 10)
        assert found["experts.gate_up_proj"].options["split_dim"] == int(transposed)


def test_experts_that_say_how_they_are_stored_are_believed() -> None:
    experts = Holder(up_proj=(4, 6, 10), down_proj=(4, 10, 6))
    experts.is_transposed = True
    found = decided(param_groups(nn.ModuleDict({"experts": experts}), split_known=True))
    assert found["experts.up_proj"].options == found["experts.down_proj"].options == {"transposed": True}


def test_experts_one_below_the_other_are_matrices_of_their_own() -> None:
    experts = Holder(w1=(12, 5), w2=(12, 5))
    experts.num_experts = 3
    found = decided(param_groups(nn.ModuleDict({"experts": experts}), split_known=True))
    assert found["experts.w1"].options == {"num_heads": 3, "split_dim": 0}


def test_an_unknown_kind_of_split_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"colums.*is not among"):
        param_groups(GPT(), split_known={"colums"})  # type: ignore[arg-type]
