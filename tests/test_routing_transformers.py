"""Routing of models of `transformers`, at tiny sizes and randomly initialised. Nothing is downloaded."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch

from muonshard.matrices import MatrixRule, find_matrices
from muonshard.routing import Decision, param_groups
from routing_models import decided, goes_to

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

COMMON = {"vocab_size": 60, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA = {**COMMON, "intermediate_size": 24, "num_key_value_heads": 2}


def build(model: str, **settings: Any) -> torch.nn.Module:
    """The model class `model`, configured by its own configuration class."""
    made = getattr(transformers, model)
    with torch.device("meta"):
        return made(made.config_class(**settings))


def layer(decisions: dict[str, Decision], prefix: str) -> dict[str, Decision]:
    """The decisions on the matrices below `prefix`, by the rest of their names."""
    return {name.removeprefix(prefix): found for name, found in decisions.items() if name.startswith(prefix)}


def test_gpt2_gives_its_conv1d_weights_to_muon_and_its_tied_embedding_to_adamw() -> None:
    model = build("GPT2LMHeadModel", vocab_size=60, n_embd=16, n_layer=2, n_head=4, n_positions=20)
    groups = param_groups(model)
    matrices = {"attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"}
    assert goes_to(groups, "muon") == {f"transformer.h.{index}.{name}.weight" for index in (0, 1) for name in matrices}
    found = decided(groups)
    assert found["transformer.wte.weight"].reason.endswith("tied with lm_head.weight")
    assert found["transformer.wpe.weight"].algorithm == "adamw"
    assert "lm_head.weight" not in found


def test_gpt2_weights_are_stored_in_out_with_heads_in_the_columns() -> None:
    model = build("GPT2LMHeadModel", vocab_size=60, n_embd=16, n_layer=1, n_head=4, n_positions=20)
    block = layer(decided(param_groups(model, split_known=True)), "transformer.h.0.")
    assert block["attn.c_attn.weight"].shape == (16, 48)
    assert block["attn.c_attn.weight"].options == {
        "splits": (16, 16, 16),
        "num_heads": 4,
        "split_dim": 1,
        "transposed": True,
    }
    assert block["attn.c_proj.weight"].options == {"num_heads": 4, "split_dim": 0, "transposed": True}
    assert block["mlp.c_fc.weight"].options == block["mlp.c_proj.weight"].options == {"transposed": True}


def test_the_cross_attention_of_gpt2_has_a_fused_key_and_value() -> None:
    settings = {"vocab_size": 60, "n_embd": 16, "n_layer": 1, "n_head": 4, "add_cross_attention": True}
    block = layer(decided(param_groups(build("GPT2LMHeadModel", **settings), split_known=True)), "transformer.h.0.")
    fused = block["crossattention.c_attn.weight"]
    assert (fused.shape, fused.options["splits"], fused.options["num_heads"]) == ((16, 32), (16, 16), 4)
    assert block["crossattention.q_attn.weight"].options["num_heads"] == 4


@pytest.mark.parametrize("tied", [False, True])
def test_llama_gives_its_projections_to_muon(tied: bool) -> None:
    groups = param_groups(build("LlamaForCausalLM", **LLAMA, tie_word_embeddings=tied))
    assert Counter(name.split(".")[-2] for name in goes_to(groups, "muon")) == dict.fromkeys(
        ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"), 2
    )
    found = decided(groups)
    assert ("lm_head.weight" in found) is not tied
    assert all(found[name].algorithm == "adamw" for name in ("model.embed_tokens.weight", "model.norm.weight"))


def test_llama_has_heads_in_the_rows_of_q_k_and_v_and_in_the_columns_of_o() -> None:
    block = layer(decided(param_groups(build("LlamaForCausalLM", **LLAMA), split_known=True)), "model.layers.0.")
    heads = {name: block[f"self_attn.{name}_proj.weight"].options for name in "qkvo"}
    assert heads["q"] == {"num_heads": 4, "split_dim": 0}
    assert heads["k"] == heads["v"] == {"num_heads": 2, "split_dim": 0}
    assert heads["o"] == {"num_heads": 4, "split_dim": 1}


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        ("MixtralForCausalLM", {"num_local_experts": 3}),
        ("Qwen2MoeForCausalLM", {"num_experts": 3, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 20}),
        ("Qwen3MoeForCausalLM", {"num_experts": 3, "moe_intermediate_size": 24, "head_dim": 8}),
    ],
)
def test_experts_in_3d_parameters_go_to_muon_and_routers_to_adamw(model: str, settings: dict[str, Any]) -> None:
    groups = param_groups(build(model, **LLAMA, **settings), split_known=True)
    found = decided(groups)
    gate_up = [decision for name, decision in found.items() if name.endswith("experts.gate_up_proj")]
    assert [(each.algorithm, each.shape) for each in gate_up] == [("muon", (3, 48, 16))] * 2
    assert all(each.options == {"splits": (24, 24), "split_dim": 0} for each in gate_up)
    assert len(find_matrices((3, 48, 16), MatrixRule(**gate_up[0].options))) == 6
    down = [decision for name, decision in found.items() if name.endswith("experts.down_proj")]
    assert [(each.algorithm, each.options) for each in down] == [("muon", {})] * 2
    routers = [decision for name, decision in found.items() if name.endswith("mlp.gate.weight")]
    assert [(each.algorithm, each.shape) for each in routers] == [("adamw", (3, 16))] * 2
    assert not any("shared_expert_gate" in name for name in goes_to(groups, "muon"))


def test_experts_of_gpt_oss_are_stored_in_out_interleaved_and_with_2d_biases() -> None:
    model = build("GptOssForCausalLM", **LLAMA, head_dim=4, num_local_experts=3)
    block = layer(decided(param_groups(model, split_known=True)), "model.layers.0.")
    assert block["mlp.experts.gate_up_proj"].options == {"transposed": True}
    assert block["mlp.experts.down_proj"].options == {"transposed": True}
    assert block["mlp.experts.gate_up_proj_bias"].algorithm == "adamw"
    assert block["mlp.router.weight"].algorithm == block["self_attn.sinks"].algorithm == "adamw"


def test_bert_gives_everything_between_embeddings_and_decoder_to_muon() -> None:
    groups = param_groups(build("BertForMaskedLM", **COMMON, intermediate_size=24), split_known=True)
    found = decided(groups)
    below = layer(found, "bert.encoder.layer.1.")
    assert {name for name, decision in below.items() if decision.algorithm == "muon"} == {
        f"{name}.weight"
        for name in (
            "attention.self.query",
            "attention.self.key",
            "attention.self.value",
            "attention.output.dense",
            "intermediate.dense",
            "output.dense",
        )
    }
    assert below["attention.self.query.weight"].options == {"num_heads": 4, "split_dim": 0}
    assert all(decision.algorithm == "adamw" for name, decision in found.items() if "embeddings" in name)
    assert found["cls.predictions.transform.dense.weight"].algorithm == "muon"
    assert "cls.predictions.decoder.weight" in found["bert.embeddings.word_embeddings.weight"].reason


@pytest.mark.parametrize("model", ["LlamaForSequenceClassification", "BertForSequenceClassification"])
def test_the_head_of_a_classifier_goes_to_adamw(model: str) -> None:
    settings = LLAMA if model.startswith("Llama") else {**COMMON, "intermediate_size": 24}
    found = decided(param_groups(build(model, **settings, num_labels=5)))
    heads = [decision for name, decision in found.items() if name in ("score.weight", "classifier.weight")]
    assert [decision.algorithm for decision in heads] == ["adamw"]


def test_fused_projections_are_split_by_what_their_model_stores() -> None:
    phi3 = decided(param_groups(build("Phi3ForCausalLM", **LLAMA, pad_token_id=0), split_known=True))
    block = layer(phi3, "model.layers.0.")
    assert block["self_attn.qkv_proj.weight"].options == {"splits": (16, 8, 8), "num_heads": (4, 2, 2), "split_dim": 0}
    assert block["mlp.gate_up_proj.weight"].options == {"splits": (24, 24), "split_dim": 0}
    neox = decided(param_groups(build("GPTNeoXForCausalLM", **COMMON, intermediate_size=24), split_known=True))
    fused = layer(neox, "gpt_neox.layers.0.attention.")["query_key_value.weight"]
    assert fused.options == {"num_heads": 12, "split_dim": 0}, "q, k and v of a head stand together"


def test_latent_attention_is_split_by_heads_where_heads_are() -> None:
    latent = {"q_lora_rank": 10, "kv_lora_rank": 6, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 8}
    routing = {"n_group": 2, "topk_group": 1, "num_experts_per_tok": 2}
    experts = {"n_routed_experts": 4, "moe_intermediate_size": 12, "first_k_dense_replace": 1, **routing}
    settings = {**LLAMA, "num_key_value_heads": 4, **latent, **experts}
    model = build("DeepseekV3ForCausalLM", **settings)
    found = decided(param_groups(model, split_known=True))
    attention = layer(found, "model.layers.0.self_attn.")
    assert attention["q_b_proj.weight"].options == {"num_heads": 4, "split_dim": 0}
    assert attention["kv_b_proj.weight"].options == {"num_heads": 4, "split_dim": 0}
    assert attention["o_proj.weight"].options == {"num_heads": 4, "split_dim": 1}
    assert attention["kv_a_proj_with_mqa.weight"].options == {}
    assert found["model.layers.1.mlp.gate.weight"].algorithm == "adamw"
    model.get_submodule("model.layers.0.self_attn").num_heads = 2  # as one of two tensor-parallel ranks has it
    local = layer(decided(param_groups(model, split_known=True)), "model.layers.0.self_attn.")
    assert local["q_b_proj.weight"].options["num_heads"] == local["o_proj.weight"].options["num_heads"] == 4


def test_all_that_goes_to_muon_can_be_read_as_matrices() -> None:
    for model, settings in (
        ("GPT2LMHeadModel", {"vocab_size": 60, "n_embd": 16, "n_layer": 1, "n_head": 4}),
        ("MixtralForCausalLM", {**LLAMA, "num_local_experts": 3}),
        ("ResNetForImageClassification", {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]}),
    ):
        for decision in param_groups(build(model, **settings), split_known=True, convolutions=True).decisions:
            if decision.algorithm == "muon":
                matrices = find_matrices(decision.shape, MatrixRule(**decision.options))
                assert sum(matrix.numel for matrix in matrices) == math.prod(decision.shape)
