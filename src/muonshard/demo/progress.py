"""How far a training run is: a bar where somebody watches a terminal, else a line now and then."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

if TYPE_CHECKING:
    from rich.progress import Progress as Bar


class Progress:
    """The progress of `steps` steps, shown by rank 0: loss, tokens per second, and what the optimizer takes of a step.

    A bar needs rich, and a terminal to show it in; plain lines are printed without either.
    """

    def __init__(self, name: str, steps: int) -> None:
        self.name, self.steps, self.step, self.speaks = name, steps, 0, dist.get_rank() == 0
        self.bar = _bar(name) if self.speaks else None
        if self.bar is not None:
            self.task = self.bar.add_task(name, total=steps, text="")

    def __enter__(self) -> Progress:
        if self.bar is not None:
            self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def show(self, loss: float, tokens_per_second: float, share: float) -> None:
        """One more step: its loss, its speed, and the optimizer's part of its time, from 0 to 1."""
        self.step += 1
        text = f"loss {loss:.3f}  {tokens_per_second:>7,.0f} tokens/s  optimizer {share:>3.0%} of the step"
        if self.bar is not None:
            self.bar.update(self.task, completed=self.step, text=text)
        elif self.speaks and (self.step % max(1, self.steps // 10) == 0 or self.step == self.steps):
            print(f"{self.name} step {self.step}/{self.steps}  {text}", flush=True)


def _bar(name: str) -> Bar | None:
    """A bar of rich, or None without rich or a terminal."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar
    except ImportError:
        return None
    if not Console().is_terminal:
        return None
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[text]}"), TimeRemainingColumn())
    return Bar(TextColumn(f"{name:>6}"), *columns)
