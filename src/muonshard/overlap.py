"""Buckets that leave during backward, as soon as their gradients are final.

Weights still change in `step` alone. What moves forward is the exchange and the orthogonalisation: a hook on each
parameter sends the next bucket when all its gradients are there, and turns round what has arrived. Hooks never wait,
and the exchanges have process groups of their own, so ranks may differ in the order in which gradients become final.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from muonshard.meshes import local_part
from muonshard.pipeline import Pipeline


class Overlap:
    """Watches the gradients of `params` (tenant i is params[i]) and drives the pipelines during backward.

    Args:
        params: the parameters of the plan's tenants.
        names: their names, for errors.
        pipelines: returns the domains' pipelines; called when a gradient is there, so that buffers are made then.
    """

    def __init__(
        self, params: Sequence[Tensor], names: Sequence[str], pipelines: Callable[[], Sequence[Pipeline]]
    ) -> None:
        self._params, self._names, self._pipelines = params, names, pipelines
        self._final: dict[int, tuple[Tensor, Tensor]] = {}
        self._sent: set[int] = set()
        self._paused = False
        self._handles = [
            param.register_post_accumulate_grad_hook(self._hook(index)) for index, param in enumerate(params)
        ]

    def remove(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Gradients that become final inside are not yet the step's: micro-batches before the last."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def check(self) -> None:
        """Before a step: no gradient may have changed since it was sent.

        Raises:
            RuntimeError: one has; it names the parameter. Nothing of the step has been applied then.
        """
        for index in sorted(self._sent):
            grad, norm = self._final[index]
            if self._params[index].grad is not grad or not torch.equal(_norm(grad), norm):
                raise RuntimeError(
                    f"the gradient of {self._names[index]} changed after backward had sent it to be orthogonalised: "
                    "clipping, unscaling and the like between backward and step cannot go with overlap='backward'"
                )

    def reset(self) -> None:
        """After a step."""
        self._final.clear()
        self._sent.clear()

    def _hook(self, index: int) -> Callable[[Tensor], None]:
        def note(param: Tensor) -> None:
            if not self._paused:
                self._note(index, param)

        return note

    @torch.no_grad()
    def _note(self, index: int, param: Tensor) -> None:
        if index in self._sent:
            raise RuntimeError(
                f"{self._names[index]} got another gradient after backward had sent the last one to be orthogonalised: "
                "run every backward before the last in `with optimizer.accumulating():`, and step after each last one"
            )
        assert param.grad is not None
        self._final[index] = (param.grad, _norm(param.grad))
        for pipeline in self._pipelines():
            while (route := pipeline.next_route) and self._final.keys() >= (tenants := set(route.shipment.all_tenants)):
                pipeline.send_next()
                self._sent |= tenants
            pipeline.turn_arrived()


def _norm(grad: Tensor) -> Tensor:
    """The sum of magnitudes in this rank's shard, which tells of changes: torch counts no versions for DTensors."""
    return torch.linalg.vector_norm(local_part(grad), ord=1)
