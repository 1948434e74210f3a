"""The matrices inside known modules: heads, fused QKV, fused gate-up, expert blocks, and weights stored (in, out).

Everything is read from types, names and attributes, and proposed only where the sizes agree. The result is options of a
parameter group, whose meaning is that of `muonshard.matrices.MatrixRule`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from muonshard.routing.places import Place, class_name, class_names, is_linear, listed, says_attention, stores_in_out

Known = Literal["fused", "heads", "transposed"]

QUERY_NAMES = listed("q_proj wq query to_q q q_lin query_proj linear_q q_b_proj wq_b q_attn q_proj_weight")
KEY_VALUE_NAMES = listed(
    "k_proj v_proj wk wv key value to_k to_v k v k_lin v_lin key_proj value_proj linear_k linear_v k_proj_weight "
    "v_proj_weight"
)
PAIRED_KEY_VALUE_NAMES = frozenset({"kv_b_proj", "wkv_b"})  # the keys and values of a head stand side by side
OUTPUT_NAMES = listed("o_proj out_proj wo c_proj to_out dense proj out o out_lin linear_out")
QKV_NAMES = listed("qkv qkv_proj wqkv c_attn in_proj_weight to_qkv attn_qkv w_pack")
INTERLEAVED_QKV_NAMES = frozenset({"query_key_value"})  # q, k and v of one head, then those of the next
INTERLEAVED_QKV_CLASSES = frozenset({"CodeGenAttention", "MiniMaxLightningAttention"})
GATE_UP_NAMES = listed("gate_up_proj gate_up w13 w12 gate_and_up_proj")
DOWN_NAMES = frozenset({"down_proj", "w2"})

HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "heads")
KEY_VALUE_HEADS = ("num_kv_heads", "num_key_value_heads", "n_kv_heads", "n_kv_head", "kv_heads")
HEAD_SIZES = ("head_dim", "head_size", "attention_head_size", "d_head", "dim_head")


@dataclass(frozen=True, slots=True)
class Attention:
    """What an attention module says of its heads; None where it does not say.

    Counts may be those of one tensor-parallel rank, so they are trusted for their ratio; sizes are the same everywhere.
    """

    heads: int | None
    kv_heads: int | None
    qk_size: int | None
    v_size: int | None
    interleaved: bool


def known_options(parameter: Tensor, place: Place, kinds: Collection[Known]) -> dict[str, Any]:
    """The matrix options that the parameter's module and name imply; {} where nothing is known.

    Args:
        parameter: a matrix, or a 3-D stack of them; its shape is the global one.
        place: where the model holds it.
        kinds: what to look for: "fused" weights, "heads" of attention, "transposed" storage.
    """
    if parameter.ndim not in (2, 3):
        return {}
    transposed = _is_transposed(parameter, place)
    out_dim, in_dim = (1, 0) if transposed else (0, 1)
    out_size, in_size = (parameter.shape[-2:][dim] for dim in (out_dim, in_dim))
    attention = _attention(place) if parameter.ndim == 2 else None
    options: dict[str, Any] = {}
    if attention is None:
        options = _blocks(parameter, place, out_size) if "fused" in kinds else {}
    elif _label(place) in QKV_NAMES | INTERLEAVED_QKV_NAMES:
        options = _fused_qkv(place, attention, out_size, in_size, kinds)
    elif "heads" in kinds:
        options = _heads(place, attention, out_size)
    if options:
        options["split_dim"] = out_dim
    elif attention is not None and "heads" in kinds and _label(place) in OUTPUT_NAMES:
        count = _count(in_size, attention.v_size, attention.heads)
        options = {"num_heads": count, "split_dim": in_dim} if count > 1 else {}
    if transposed and "transposed" in kinds:
        options["transposed"] = True
    return options


def _is_transposed(parameter: Tensor, place: Place) -> bool:
    """Whether each matrix is stored (in, out): experts of transformers say so, or the shapes of gate-up and down do."""
    if parameter.ndim == 2:
        return stores_in_out(place.module)
    if getattr(place.module, "is_transposed", False) is True:
        return True
    own = dict(place.module.named_parameters(recurse=False))
    gate_up = next((own[name].shape for name in sorted(GATE_UP_NAMES & own.keys())), None)
    down = next((own[name].shape for name in sorted(DOWN_NAMES & own.keys())), None)
    if gate_up is None or down is None or len(gate_up) != 3 or len(down) != 3:
        return False
    return gate_up[2] == 2 * down[1] and gate_up[1] == down[2]


def _attention(place: Place) -> Attention | None:
    """What the module that holds the parameter, or the one above it, says of heads; None if neither is attention."""
    if not place.in_attention and not any(says_attention(class_name(module)) for module in place.parents[-1:]):
        return None
    for module in (place.module, *place.parents[-1:]):
        config = getattr(module, "config", None)
        heads, kv_heads = (_read((module, config), names) for names in (HEADS, KEY_VALUE_HEADS))
        qk_size, v_size = (_read((module,), (name, *HEAD_SIZES)) for name in ("qk_head_dim", "v_head_dim"))
        if heads or qk_size:
            interleaved = _label(place) in INTERLEAVED_QKV_NAMES or bool(
                INTERLEAVED_QKV_CLASSES & set(class_names(module))
            )
            return Attention(heads, kv_heads, qk_size, v_size, interleaved)
    return None


def _label(place: Place) -> str:
    """The name that says what the weight is for; Wqkv and wqkv are one."""
    return place.label.lower()


def _read(holders: Iterable[object], names: Iterable[str]) -> int | None:
    """The first positive integer attribute of these names."""
    values = (_attribute(holder, name) for holder in holders for name in names)
    return next((value for value in values if isinstance(value, int) and value > 0), None)


def _attribute(holder: object, name: str) -> object:
    try:
        return getattr(holder, name, None)
    except RuntimeError:  # configurations of transformers refuse what differs from layer to layer
        return None


def _count(size: int, head_size: int | None, heads: int | None) -> int:
    """How many heads a dim of `size` holds; 1 if that cannot be told."""
    if head_size and size % head_size == 0:
        return size // head_size
    return heads if heads and size % heads == 0 else 1


def _heads(place: Place, attention: Attention, out_size: int) -> dict[str, Any]:
    """The heads of a query, key or value projection."""
    if _label(place) in QUERY_NAMES:
        count = _count(out_size, attention.qk_size, attention.heads)
    elif _label(place) in KEY_VALUE_NAMES:
        count = _count(out_size, attention.v_size, attention.kv_heads or attention.heads)
    elif _label(place) in PAIRED_KEY_VALUE_NAMES:
        count = _count(out_size, None, attention.heads)
    else:
        return {}
    return {"num_heads": count} if count > 1 else {}


def _fused_qkv(
    place: Place, attention: Attention, out_size: int, in_size: int, kinds: Collection[Known]
) -> dict[str, Any]:
    """The blocks and heads of a fused QKV projection, with as many or fewer heads in K and V as in Q."""
    heads, kv_heads = attention.heads, attention.kv_heads or attention.heads
    if heads is None or kv_heads is None:
        heads = kv_heads = _count(in_size, attention.qk_size, None)
    parts: tuple[int, ...] = (heads, kv_heads, kv_heads)
    head_size = attention.qk_size or max(out_size // sum(parts), 1)
    if out_size == 2 * kv_heads * head_size:  # cross-attention: K and V only
        parts = (kv_heads, kv_heads)
    scale, rest = divmod(out_size, sum(parts) * head_size)
    if rest or scale == 0:
        return {}
    counts = tuple(part * scale for part in parts)
    if attention.interleaved or "fused" not in kinds:
        return {"num_heads": sum(counts)} if "heads" in kinds else {}
    options: dict[str, Any] = {"splits": tuple(count * head_size for count in counts)}
    if "heads" in kinds and max(counts) > 1:
        options["num_heads"] = counts[0] if len(set(counts)) == 1 else counts
    return options


def _blocks(parameter: Tensor, place: Place, out_size: int) -> dict[str, Any]:
    """The blocks along the output dim outside attention: gate and up, recurrent gates, experts one below the other."""
    module = place.module
    if _label(place) in GATE_UP_NAMES and out_size % 2 == 0 and getattr(module, "is_concatenated", True):
        return {"splits": (out_size // 2,) * 2}
    if isinstance(module, nn.RNNBase | nn.RNNCellBase):
        gates, rest = divmod(out_size, module.hidden_size)
        return {"splits": (module.hidden_size,) * gates} if gates > 1 and not rest else {}
    experts = _read((module,), ("moe_num_experts", "num_experts"))
    stacked = parameter.ndim == 2 and place.in_expert and not is_linear(module)
    if stacked and experts and 1 < experts < out_size and out_size % experts == 0:
        return {"num_heads": experts}
    return {}
