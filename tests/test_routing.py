"""Where the parameters of hand-written models and of torch's own modules go."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from muonshard.routing import param_groups
from routing_models import GPT, ConvNet, Holder, MoE, SwiGLU, decided, goes_to, grouped_names


def test_a_gpt_gives_its_hidden_matrices_to_muon() -> None:
    groups = param_groups(GPT())
    assert goes_to(groups, "muon") == {
        f"blocks.{layer}.{name}.weight"
        for layer in range(2)
        for name in ("attn.wqkv", "attn.wo", "mlp.gate", "mlp.up", "mlp.down")
    }
    reasons = decided(groups)
    assert "embedding" in reasons["wte.weight"].reason
    assert "pos_embed" in reasons["pos_embed"].reason
    assert "output" in reasons["lm_head.weight"].reason
    assert "norm" in reasons["norm_f.weight"].reason


def test_a_tied_head_is_listed_once_and_goes_to_adamw() -> None:
    groups = param_groups(GPT(tied=True))
    assert grouped_names(groups).count("wte.weight") == 1
    assert "lm_head.weight" not in grouped_names(groups)
    decision = decided(groups)["wte.weight"]
    assert decision.algorithm == "adamw"
    assert decision.reason.endswith("tied with lm_head.weight")


def test_tying_alone_is_enough_to_know_an_output_layer() -> None:
    model = nn.ModuleDict({"mixer": nn.Linear(4, 4), "lookup": nn.Embedding(4, 4), "hidden": nn.Linear(4, 4)})
    model["mixer"].weight = model["lookup"].weight
    assert goes_to(param_groups(model), "muon") == {"hidden.weight"}


def test_a_layer_shared_by_all_blocks_is_listed_once() -> None:
    shared = nn.Linear(4, 6)
    groups = param_groups(nn.ModuleList([nn.ModuleDict({"layer": shared}) for _ in range(3)]))
    assert grouped_names(groups) == ["0.layer.weight", "0.layer.bias"]
    assert "tied with 1.layer.weight and 1 more" in decided(groups)["0.layer.weight"].reason


def test_frozen_parameters_are_left_out_and_the_table_says_so() -> None:
    model = GPT()
    model.blocks[0].requires_grad_(False)
    groups = param_groups(model)
    assert not any(name.startswith("blocks.0.") for name in grouped_names(groups))
    line = next(line for line in groups.table().splitlines() if line.startswith("blocks.0.attn.wo.weight"))
    assert "frozen" in line


@pytest.mark.parametrize("name", ["head", "lm_head", "value_head", "output", "out", "fc", "classifier", "embed_out"])
def test_an_output_layer_is_known_by_its_name(name: str) -> None:
    model = nn.ModuleDict({"hidden": nn.Linear(6, 8), name: nn.Linear(8, 5)})
    assert goes_to(param_groups(model), "muon") == {"hidden.weight"}


def test_only_the_last_layer_of_a_classifier_is_the_output_layer() -> None:
    classifier = nn.Sequential(nn.Linear(8, 7), nn.ReLU(), nn.Linear(7, 6), nn.ReLU(), nn.Linear(6, 5))
    groups = param_groups(nn.ModuleDict({"classifier": classifier}))
    assert goes_to(groups, "muon") == {"classifier.0.weight", "classifier.2.weight"}


def test_every_one_of_several_heads_is_an_output_layer() -> None:
    model = nn.ModuleDict({"body": nn.Linear(8, 8), "heads": nn.ModuleList([nn.Linear(8, 5), nn.Linear(8, 3)])})
    assert goes_to(param_groups(model), "muon") == {"body.weight"}


def test_names_of_heads_inside_blocks_and_attention_mean_nothing() -> None:
    class HeadByHeadAttention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads = nn.ModuleList([nn.ModuleDict({"key": nn.Linear(8, 4), "value": nn.Linear(8, 4)})])
            self.output = nn.Linear(4, 8)

    block = nn.ModuleDict({"output": nn.Linear(6, 8), "head": nn.Linear(8, 6)})
    model = nn.ModuleDict({"blocks": nn.ModuleList([block]), "mixer": HeadByHeadAttention(), "head": nn.Linear(8, 9)})
    groups = param_groups(model)
    assert {name for name in goes_to(groups, "adamw") if name.endswith("weight")} == {"head.weight"}


def test_common_names_of_output_layers_count_only_near_the_top() -> None:
    deep = nn.ModuleDict({"encoder": nn.ModuleDict({"subsample": nn.ModuleDict({"out": nn.Linear(6, 8)})})})
    assert goes_to(param_groups(deep), "muon") == {"encoder.subsample.out.weight"}


def test_what_is_called_a_head_but_computes_attention_is_no_output_layer() -> None:
    head = nn.ModuleDict({"key": nn.Linear(8, 4), "query": nn.Linear(8, 4), "value": nn.Linear(8, 4)})
    assert len(goes_to(param_groups(nn.ModuleDict({"sa_head": head})), "muon")) == 3


def test_a_square_layer_inside_a_head_is_hidden() -> None:
    model = nn.ModuleDict({"lm_head": nn.Sequential(nn.Linear(8, 8)), "decoder": nn.Linear(8, 20)})
    assert "lm_head.0.weight" in goes_to(param_groups(model), "muon")


def test_a_large_vocabulary_tells_output_layers_of_blocks_too() -> None:
    blocks = nn.ModuleList([nn.ModuleDict({"mix": nn.Linear(4, 16), "project": nn.Linear(4, 40)}) for _ in range(2)])
    groups = param_groups(nn.ModuleDict({"lookup": nn.Embedding(40, 4), "blocks": blocks}))
    assert goes_to(groups, "muon") == {"blocks.0.mix.weight", "blocks.1.mix.weight"}


def test_an_output_layer_is_known_by_the_size_of_the_vocabulary() -> None:
    model = nn.ModuleDict({"lookup": nn.Embedding(20, 8), "mix": nn.Linear(8, 12), "project": nn.Linear(8, 20)})
    groups = param_groups(model)
    assert goes_to(groups, "muon") == {"mix.weight"}
    assert "20 outputs" in decided(groups)["project.weight"].reason


def test_a_vocabulary_as_large_as_a_hidden_layer_takes_no_layer_of_a_block() -> None:
    model = GPT(vocabulary=48, dim=16)  # the MLPs have 48 outputs too
    assert {"blocks.0.mlp.gate.weight", "blocks.1.mlp.up.weight"} <= goes_to(param_groups(model), "muon")


def test_the_number_of_positions_is_no_vocabulary() -> None:
    model = nn.ModuleDict({"position_embeddings": nn.Embedding(12, 8), "mix": nn.Linear(8, 12)})
    assert goes_to(param_groups(model), "muon") == {"mix.weight"}


def test_what_the_model_calls_its_output_embeddings_goes_to_adamw() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

        def get_output_embeddings(self) -> nn.Module:
            return self.last

    assert goes_to(param_groups(Named()), "muon") == {"mix.weight"}


def test_a_model_that_does_not_implement_get_output_embeddings_is_read_by_names() -> None:
    class Unnamed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix, self.head = nn.Linear(8, 8), nn.Linear(8, 5)

        def get_output_embeddings(self) -> nn.Module:
            raise NotImplementedError

    assert goes_to(param_groups(Unnamed()), "muon") == {"mix.weight"}


def test_experts_go_to_muon_and_their_router_to_adamw() -> None:
    groups = param_groups(nn.ModuleDict({"layers": nn.ModuleList([MoE()])}))
    assert goes_to(groups, "muon") == {"layers.0.w1", "layers.0.w2"}
    reasons = decided(groups)
    assert "4 experts" in reasons["layers.0.w1"].reason
    assert "router" in reasons["layers.0.gate.weight"].reason
    assert "one row" in reasons["layers.0.shared_expert_gate.weight"].reason


def test_a_router_goes_to_muon_if_included() -> None:
    groups = param_groups(MoE(), include="gate.weight")
    assert "gate.weight" in goes_to(groups, "muon")
    assert "include" in decided(groups)["gate.weight"].reason


def test_the_gate_of_an_expert_is_no_router_even_with_as_many_rows_as_experts() -> None:
    experts = nn.ModuleList([SwiGLU(6, 4) for _ in range(4)])
    model = nn.ModuleDict({"gate": nn.Linear(6, 4), "experts": experts, "shared_expert": SwiGLU(6, 4)})
    groups = param_groups(model)
    expected = {f"experts.{index}.gate.weight" for index in range(4)} | {"shared_expert.gate.weight"}
    assert expected <= goes_to(groups, "muon")
    assert "router" in decided(groups)["gate.weight"].reason


def test_layers_inside_a_router_go_to_adamw() -> None:
    model = nn.ModuleDict({"router": nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4)), "mix": nn.Linear(6, 6)})
    assert goes_to(param_groups(model), "muon") == {"mix.weight"}


def test_bilinear_forms_and_heads_spread_over_dims_are_no_stacks() -> None:
    model = nn.ModuleDict({"form": nn.Bilinear(3, 4, 5), "attn": Holder(q=(8, 2, 4), per_head=(2, 8, 4))})
    assert goes_to(param_groups(model), "muon") == {"attn.per_head"}


@pytest.mark.parametrize(
    "name",
    ["pos_embed", "position", "cls_token", "mask_token", "token_table", "wpe", "register_tokens", "posEmbedding"],
)
@pytest.mark.parametrize("shape", [(7, 6), (1, 7, 6), (2, 7, 6)])
def test_raw_parameters_named_as_embeddings_go_to_adamw(name: str, shape: tuple[int, ...]) -> None:
    groups = param_groups(Holder(**{name: shape, "mix": (6, 6)}))
    assert goes_to(groups, "muon") == {"mix"}


@pytest.mark.parametrize(
    "name", ["A_log", "D", "layer_scale", "gamma", "bias_table", "attention_biases", "up_proj_bias"]
)
def test_raw_parameters_that_are_no_linear_maps_go_to_adamw(name: str) -> None:
    assert goes_to(param_groups(Holder(**{name: (4, 6), "mix": (6, 6)})), "muon") == {"mix"}


@pytest.mark.parametrize("name", ["w_q", "kernel", "proposal", "disembodied", "tokenless", "expose", "logits_mix"])
def test_a_word_inside_another_word_means_nothing(name: str) -> None:
    assert goes_to(param_groups(Holder(**{name: (4, 6)})), "muon") == {name}


@pytest.mark.parametrize("module", [nn.LayerNorm((4, 6)), nn.RMSNorm((4, 6))])
def test_norms_of_two_dims_go_to_adamw(module: nn.Module) -> None:
    groups = param_groups(nn.ModuleDict({"n": module, "mix": nn.Linear(6, 6)}))
    assert goes_to(groups, "muon") == {"mix.weight"}


def test_layers_that_embed_their_input_go_to_adamw() -> None:
    model = nn.ModuleDict(
        {
            "patch_embed": nn.ModuleDict({"proj": nn.Linear(12, 8)}),
            "embed": nn.Linear(5, 8),
            "vision_embed_tokens": nn.Linear(12, 8),
            "time_embed": nn.Sequential(nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 8)),
        }
    )
    assert goes_to(param_groups(model), "muon") == {"time_embed.0.weight", "time_embed.2.weight"}


def test_weights_that_are_computed_from_parameters_go_to_adamw() -> None:
    model = nn.ModuleDict(
        {
            "new": nn.utils.parametrizations.weight_norm(nn.Linear(6, 4)),
            "spectral": nn.utils.parametrizations.spectral_norm(nn.Linear(6, 4)),
            "plain": nn.Linear(6, 4),
        }
    )
    assert goes_to(param_groups(model), "muon") == {"plain.weight"}


def test_complex_parameters_go_to_adamw_and_cannot_be_included() -> None:
    model = nn.ModuleDict({"spectrum": nn.Linear(4, 4, dtype=torch.complex64), "mix": nn.Linear(4, 4)})
    assert goes_to(param_groups(model), "muon") == {"mix.weight"}
    with pytest.raises(ValueError, match=r"spectrum\.weight.*complex64"):
        param_groups(model, include="spectrum.weight")


def test_convolutions_go_to_adamw_unless_asked() -> None:
    groups = param_groups(ConvNet())
    assert goes_to(groups, "muon") == {"features.0.weight", "features.1.weight"}
    assert "convolutions=True" in decided(groups)["stem.weight"].reason


def test_convolutions_that_are_asked_for_are_flattened_but_never_depthwise_or_transposed_ones() -> None:
    groups = param_groups(ConvNet(), convolutions=True)
    found = decided(groups)
    assert found["stem.weight"].options == found["pointwise.weight"].options == {"flatten": True}
    assert found["grouped.weight"].options == {"flatten": True, "num_heads": 2}
    for name in ("depthwise", "short", "up", "norm", "fc"):
        assert found[f"{name}.weight"].algorithm == "adamw"
    assert "transposed" in found["up.weight"].reason
    assert "depthwise" in found["short.weight"].reason


def test_convolutions_of_one_channel_go_to_muon_only_if_they_are_matrices() -> None:
    model = nn.ModuleDict({"image": nn.Conv2d(1, 4, 3), "sound": nn.Conv1d(1, 4, 3), "mono": nn.Conv2d(4, 1, 3)})
    assert goes_to(param_groups(model, convolutions=True), "muon") == {"image.weight"}


def test_a_transposed_convolution_can_be_included() -> None:
    assert decided(param_groups(ConvNet(), include="up.*t"))["up.weight"].options == {"flatten": True}
