"""The code on the page about layouts runs, from top to bottom, as the page says: on four processes."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

from pool import Pool

PAGE = Path(__file__).parent.parent / "docs" / "layouts.md"


def run_page(code: str) -> str:
    """What the code prints on this rank."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, str(PAGE), "exec"), {"__name__": "page"})
    return printed.getvalue()


def test_the_code_on_the_page_runs(pool: Pool) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    assert len(blocks) == 6
    for printed in pool.run(4, run_page, "\n".join(blocks)):
        assert "bytes" in printed or "B" in printed
        assert "experts became infinite or NaN" in printed
