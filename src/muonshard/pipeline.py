"""A domain's buckets on their way through a step, several at a time: one is computed while others travel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from muonshard.exchange import Lag
from muonshard.shards import Load, Route
from muonshard.verdict import Verdict


@dataclass(frozen=True)
class Stages:
    """What is done with a bucket, in order; between them it travels."""

    send: Callable[[Route], Load]
    turn: Callable[[Load], None]
    level: Callable[[Load], None]
    apply: Callable[[Load], None]


class Pipeline:
    """The buckets of one domain. Every rank of the domain takes them through the stages in the same order."""

    def __init__(self, routes: Sequence[Route], lag: Lag, stages: Stages) -> None:
        self.routes = routes
        self.verdict = routes[0].shipment.verdict if routes else Verdict()
        self._lag, self._stages = lag, stages
        self._loads: dict[int, Load] = {}
        self._sent = self._turned = 0

    def finish(self) -> None:
        """Take all buckets through all stages, and be ready for the next step, also after an error."""
        try:
            self._take_all()
        finally:
            self._loads.clear()
            self._sent = self._turned = 0

    def _take_all(self) -> None:
        for tick in range(len(self.routes) + self._lag.apply):
            if tick >= self._sent and tick < len(self.routes):
                self.send_next()
            turn, level, apply = tick - self._lag.turn, tick - self._lag.level, tick - self._lag.apply
            if self._turned <= turn < len(self.routes):
                self._turn_next()
            if level in self._loads:
                self._stages.level(self._loads[level])
            if apply in self._loads:
                self._stages.apply(self._loads.pop(apply))

    def send_next(self) -> None:
        """Send the first bucket that has not been sent yet."""
        self._loads[self._sent] = self._stages.send(self.routes[self._sent])
        self._sent += 1

    def turn_arrived(self) -> None:
        """Turn round, in order, the buckets whose matrices are here already; never waits."""
        while self._turned < self._sent and self._loads[self._turned].route.shipment.has_arrived():
            self._turn_next()

    @property
    def next_route(self) -> Route | None:
        """The first bucket that has not been sent yet."""
        return self.routes[self._sent] if self._sent < len(self.routes) else None

    def _turn_next(self) -> None:
        self._stages.turn(self._loads[self._turned])
        self._turned += 1
