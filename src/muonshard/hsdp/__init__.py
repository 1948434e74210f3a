"""The shard layer of muonshard by itself: for optimizers of one's own that need whole matrices of sharded parameters.

    local_params, groups = group_parameters_for_hsdp(model.parameters())
    for group in groups:                                    # once
        metadata = build_param_shard_metadata_for_group(group)
    ...
    inputs = build_pad_ns_inputs(group.params, momentum, metadata)          # every step
    whole = fused_allgather_dtensor_params(inputs, group.shard_pgs, group.layout_spec, metadata, buffers)
    mine = chunk_update_by_layout(my_update(whole[0]), group.params[0], group.layout_spec, metadata[group.params[0]])

`examples/custom_optimizer.py` is a whole optimizer. The only collectives are all-gathers: one for each mesh axis that
cuts the group's parameters, whatever their number.
"""

from muonshard.hsdp.gather import fused_allgather_dtensor_params
from muonshard.hsdp.groups import build_owner_by_size, group_parameters_for_hsdp
from muonshard.hsdp.metadata import (
    build_param_shard_metadata_for_group,
    log_param_shard_metadata,
    make_param_shard_meta,
)
from muonshard.hsdp.placements import to_local_if_dtensor
from muonshard.hsdp.slices import build_pad_ns_inputs, chunk_update_by_layout
from muonshard.hsdp.types import (
    CommDomainKey,
    HSDPCommGroup,
    ParamLayoutSpec,
    ParamRecord,
    ParamShardMeta,
    ParamShardStageMeta,
)

__all__ = [
    "CommDomainKey",
    "HSDPCommGroup",
    "ParamLayoutSpec",
    "ParamRecord",
    "ParamShardMeta",
    "ParamShardStageMeta",
    "build_owner_by_size",
    "build_pad_ns_inputs",
    "build_param_shard_metadata_for_group",
    "chunk_update_by_layout",
    "fused_allgather_dtensor_params",
    "group_parameters_for_hsdp",
    "log_param_shard_metadata",
    "make_param_shard_meta",
    "to_local_if_dtensor",
]
