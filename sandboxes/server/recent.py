"""A bounded memory of what has ended."""

from __future__ import annotations

from collections import OrderedDict

_LIMIT = 10_000


class Recent(OrderedDict[str, str]):
    """The most recent 10,000 items: closed channels, cancelled calls, removed sandboxes."""

    def __setitem__(self, key: str, value: str) -> None:
        super().__setitem__(key, value)
        if len(self) > _LIMIT:
            self.popitem(last=False)
