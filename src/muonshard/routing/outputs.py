"""The output layers of a model: found by what the model says, by name, and by the size of its vocabulary."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from muonshard.routing.places import Site, is_linear, listed, words

HEAD_NAMES = listed(
    "classifier output_layer output_projection embed_out unembed unembedding score logits to_logits readout qa_outputs"
)
TOP_LEVEL_HEAD_NAMES = listed("out output fc fc_out")  # deeper down these are common names for other layers
ATTENTION_CHILDREN = frozenset({"query", "key", "value", "q_proj", "k_proj", "v_proj", "qkv"})
LARGE_VOCABULARY = 8  # times its inputs: no layer inside a block has so many outputs


def output_weights(found: list[Site]) -> dict[int, str]:
    """How each weight of an output layer was recognised, by the id of the parameter."""
    reasons: dict[int, str] = {}
    for module, reason in (*_by_vocabulary(found), *_by_name(found), *_by_model(found)):
        for parameter in module.parameters():
            if parameter.ndim >= 2:
                reasons[id(parameter)] = reason
    return reasons


def _by_model(found: list[Site]) -> Iterator[tuple[nn.Module, str]]:
    """What `get_output_embeddings()` returns, as the models of transformers have it."""
    for site in found:
        ask = getattr(site.module, "get_output_embeddings", None)
        if not callable(ask):
            continue
        try:
            answer = ask()
        except NotImplementedError:
            continue
        if isinstance(answer, nn.Module):
            yield answer, "get_output_embeddings()"


def _by_name(found: list[Site]) -> Iterator[tuple[nn.Module, str]]:
    """Layers such as `lm_head`, and the last layer of containers such as `classifier`, outside blocks and attention."""
    for site in found:
        if not site.path or site.in_numbered_block or site.in_attention:
            continue
        name = site.path[-1]
        children = dict(site.module.named_children())
        at_top = len(site.path) <= 2 and name in TOP_LEVEL_HEAD_NAMES
        called_head = at_top or name in HEAD_NAMES or words(name)[-1:] in (("head",), ("heads",))
        if not called_head or ATTENTION_CHILDREN & children.keys():
            continue
        several = isinstance(site.module, nn.ModuleList | nn.ModuleDict)
        for module in children.values() if several else (site.module,):
            if (last := _last_layer(module)) is not None:
                yield last, f"named {name}"


def _last_layer(module: nn.Module) -> nn.Module | None:
    """The last module in `module`, in order of registration, whose weight has two dims or more.

    A square one inside a container does not count: heads of BERT's style hold a square layer, and not always the last.
    """
    weights = ((layer, getattr(layer, "weight", None)) for layer in module.modules())
    layers = [(layer, weight) for layer, weight in weights if isinstance(weight, nn.Parameter) and weight.ndim >= 2]
    if not layers:
        return None
    layer, weight = layers[-1]
    return layer if layer is module or weight.shape[0] != weight.shape[1] else None


def _by_vocabulary(found: list[Site]) -> Iterator[tuple[nn.Module, str]]:
    """Linear layers with as many outputs as a token embedding has rows. Square ones are left out, and those in a block
    unless the vocabulary is large: there the sizes may agree by chance."""
    vocabularies = {
        site.module.weight.shape[0]: ".".join(site.path)
        for site in found
        if isinstance(site.module, nn.Embedding) and not _counts_positions(site)
    }
    for site in found:
        weight = getattr(site.module, "weight", None)
        if not is_linear(site.module) or not isinstance(weight, nn.Parameter) or weight.ndim != 2:
            continue
        rows, columns = weight.shape
        by_chance = rows == columns or (site.in_numbered_block and rows < LARGE_VOCABULARY * columns)
        if rows in vocabularies and not by_chance:
            yield site.module, f"{rows} outputs, the rows of {vocabularies[rows]}"


def _counts_positions(site: Site) -> bool:
    """Whether an embedding is of positions, segments or the like, not of a vocabulary."""
    names = set(words(site.path[-1])) if site.path else set()
    return bool(
        names & {"pos", "position", "positions", "positional", "wpe", "type", "segment", "time", "bias", "relative"}
    )
