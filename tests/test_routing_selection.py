"""What the caller says, what comes back, and the table."""

from __future__ import annotations

import dataclasses

import pytest
from torch import nn

from muonshard.routing import param_groups
from routing_models import GPT, Wrapper, decided, goes_to


def test_globs_match_names_with_and_without_wrappers_and_groups_keep_the_wrapped_names() -> None:
    model = GPT()
    model.blocks[0].attn.wo = Wrapper("_checkpoint_wrapped_module", model.blocks[0].attn.wo)
    wrapped = Wrapper("_orig_mod", Wrapper("module", model))
    groups = param_groups(wrapped, exclude=["blocks.0.attn.wo.weight", "_orig_mod.module.blocks.1.mlp.*"])
    name = "_orig_mod.module.blocks.0.attn.wo._checkpoint_wrapped_module.weight"
    assert name in dict(wrapped.named_parameters())
    assert name in goes_to(groups, "adamw")
    assert not any(".1.mlp." in name for name in goes_to(groups, "muon"))
    assert "_orig_mod.module.blocks.0.mlp.up.weight" in goes_to(groups, "muon")


def test_wrappers_hide_no_structure() -> None:
    model = GPT()
    model.blocks[0].attn.wqkv = Wrapper("_orig_mod", model.blocks[0].attn.wqkv)
    name = "blocks.0.attn.wqkv._orig_mod.weight"
    assert decided(param_groups(model, split_known=True))[name].options["num_heads"] == (4, 2, 2)


def test_a_glob_on_any_name_of_a_tied_weight_names_it() -> None:
    groups = param_groups(GPT(tied=True), include="lm_head.weight")
    assert "wte.weight" in goes_to(groups, "muon")


def test_functions_get_clean_names_and_parameters() -> None:
    def wide(name: str, parameter: nn.Parameter) -> bool:
        return name.startswith("blocks.") and parameter.ndim == 2 and parameter.shape[1] > 16

    groups = param_groups(Wrapper("module", GPT()), exclude=wide)
    assert goes_to(groups, "adamw") >= {f"module.blocks.{layer}.mlp.down.weight" for layer in range(2)}
    assert "named by exclude (wide)" in decided(groups)["module.blocks.0.mlp.down.weight"].reason


def test_exclude_wins_over_include() -> None:
    groups = param_groups(GPT(), include="*mlp*", exclude="*.down.weight")
    assert {name for name in goes_to(groups, "adamw") if "mlp" in name} == {
        f"blocks.{i}.mlp.down.weight" for i in (0, 1)
    }


@pytest.mark.parametrize("argument", ["include", "exclude"])
def test_a_glob_that_matches_nothing_is_an_error_that_names_close_matches(argument: str) -> None:
    with pytest.raises(ValueError, match=rf"{argument}='lm_hed.weight' matches no parameter.*lm_head\.weight"):
        param_groups(GPT(), **{argument: ["*.wo.weight", "lm_hed.weight"]})
    with pytest.raises(ValueError, match=r"'attn' matches no parameter.*blocks\.0\.attn\.wqkv\.weight.*\*"):
        param_groups(GPT(), **{argument: "attn"})


def test_including_what_holds_no_matrix_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"named by include \(norm_f\.\*\): norm_f\.weight has shape \(16,\)"):
        param_groups(GPT(), include="norm_f.*")


def test_selectors_of_other_types_are_an_error() -> None:
    with pytest.raises(TypeError, match=r"exclude takes globs and functions.*got 3"):
        param_groups(GPT(), exclude=["*norm*", 3])  # type: ignore[list-item]


def test_groups_carry_only_the_options_given() -> None:
    bare = param_groups(GPT())
    assert [set(group) for group in bare] == [{"params", "algorithm"}] * 2
    groups = param_groups(GPT(), lr=0.02, momentum=0.9, adjust_lr_fn=None, adamw_lr=3e-4, adamw_betas=(0.9, 0.95))
    given_options = [{key: value for key, value in group.items() if key != "params"} for group in groups]
    assert given_options == [
        {"algorithm": "muon", "lr": 0.02, "momentum": 0.9, "adjust_lr_fn": None},
        {"algorithm": "adamw", "lr": 3e-4, "betas": (0.9, 0.95)},
    ]


def test_an_unknown_option_is_an_error_that_names_the_closest() -> None:
    with pytest.raises(TypeError, match="no option 'momentun': did you mean momentum"):
        param_groups(GPT(), momentun=0.9)  # type: ignore[call-arg]


def test_a_model_without_matrices_warns_and_says_why() -> None:
    stage = nn.ModuleDict({"wte": nn.Embedding(5, 4), "norm": nn.LayerNorm(4)})
    with pytest.warns(UserWarning, match=r"no parameter goes to Muon: 1 x embedding \(Embedding\), 1 x norm") as caught:
        groups = param_groups(stage)
    assert goes_to(groups, "adamw") == {"wte.weight", "norm.weight", "norm.bias"}
    assert caught[0].filename == __file__


def test_a_model_with_nothing_to_train_is_an_error() -> None:
    with pytest.raises(ValueError, match="every parameter is frozen"):
        param_groups(GPT().requires_grad_(False))
    with pytest.raises(ValueError, match="no parameters"):
        param_groups(nn.ReLU())


def test_parameters_that_are_not_initialised_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"1\.weight is not initialised.*run the model once"):
        param_groups(nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(4)))


def test_anything_but_a_module_is_an_error() -> None:
    with pytest.raises(TypeError, match=r"torch\.nn\.Module, got list"):
        param_groups(list(GPT().parameters()))  # type: ignore[arg-type]


def test_several_models_in_a_list_are_read_as_models_of_their_own() -> None:
    stages = nn.ModuleList([nn.ModuleDict({"mix": nn.Linear(4, 4)}), nn.ModuleDict({"output": nn.Linear(4, 6)})])
    assert goes_to(param_groups(stages), "muon") == {"0.mix.weight"}


def test_the_table_shows_name_shape_destination_and_reason_of_every_parameter() -> None:
    model = GPT(tied=True)
    groups = param_groups(model, split_known=True)
    lines = str(groups).splitlines()
    assert len(lines) == 2 + len(list(model.named_parameters()))
    assert lines[0].split() == ["parameter", "shape", "goes", "to", "reason"]
    wqkv = next(line for line in lines if line.startswith("blocks.0.attn.wqkv.weight "))
    assert [cell.strip() for cell in wqkv.split("  ") if cell.strip()] == [
        "blocks.0.attn.wqkv.weight",
        "32 x 16",
        "Muon",
        "linear weight (Linear); rows 16 + 8 + 8; heads 4 + 2 + 2",
    ]


def test_decisions_are_frozen_data() -> None:
    decision = decided(param_groups(GPT()))["wte.weight"]
    assert (decision.shape, decision.algorithm) == ((50, 16), "adamw")
    with pytest.raises(dataclasses.FrozenInstanceError):
        decision.algorithm = "muon"  # type: ignore[misc]


def test_the_representation_is_short() -> None:
    model = GPT()
    model.norm_f.requires_grad_(False)
    assert repr(param_groups(model)) == "<ParamGroups: 10 to Muon, 7 to AdamW, 1 frozen>"
