"""A bounded memory of materialised data."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable

from everfed.core.data import Data


class DataCache:
    """Least recently used data goes first once `limit` bytes of samples are exceeded; the newest always stays."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.bytes = 0
        self._held: OrderedDict[Hashable, Data] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], Data]) -> Data:
        """The data under `key`, made when it is not held."""
        if key in self._held:
            self._held.move_to_end(key)
            return self._held[key]
        data = self._held[key] = make()
        self.bytes += _size(data)
        while self.bytes > self.limit and len(self._held) > 1:
            self.bytes -= _size(self._held.popitem(last=False)[1])
        return data


def _size(data: Data) -> int:
    return data.x.nbytes + data.y.nbytes + data.ids.nbytes
