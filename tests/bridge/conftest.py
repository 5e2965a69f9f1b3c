"""What most tests of the sender start from."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.weight_updates import UpdaterServer, llama


@pytest.fixture
def server() -> Iterator[UpdaterServer]:
    """An updater of llama(0) behind HTTP."""
    with UpdaterServer(llama(0)) as running:
        yield running
