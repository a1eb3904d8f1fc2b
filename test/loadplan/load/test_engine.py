"""What is refused before an engine is opened."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadplan.core.header import LoadPlanError
from loadplan.load.engine import check_checkpoint


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe\xff"])
def test_damaged_configuration_is_named(tmp_path: Path, content: bytes) -> None:
    """Red when the error is the parser's alone, without a file."""
    config = tmp_path / "config.json"
    config.write_bytes(content)
    with pytest.raises(LoadPlanError, match=r"config\.json: not JSON .*, expected"):
        check_checkpoint(tmp_path)
