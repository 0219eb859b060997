"""What each tenant of a sandbox server uses of what all of them share.

Invariant: a tenant exceeds neither its own quota nor the server's. Half of every limit is reserved for the tenants in
equal parts, and the other half goes to the first requests. So no tenant can use the reserved part of another one.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

from agentkit.errors import QuotaExceeded
from agentkit.sandboxes.server.policy import Quota, TenantQuota


class Share:
    """The share of one tenant.

    Attributes:
        name: the name of the tenant.
        own: the tenant's own limits.
        total: the limits of all tenants together.
        held: returns how much of an amount the tenant's sandboxes hold.
    """

    def __init__(self, name: str, own: TenantQuota, total: Quota, everyone: list[Share]) -> None:
        """Join ``everyone``, the shares of one server."""
        self.name = name
        self.own = own
        self.total = total
        self.held: Callable[[str], float] = lambda name: 0.0
        self._counts: defaultdict[str, float] = defaultdict(float)
        self._everyone = everyone
        everyone.append(self)

    def used(self, name: str) -> float:
        return self._counts[name] + self.held(name)

    def check(self, **amounts: float) -> None:
        """Raise ``QuotaExceeded`` unless the tenant may use these amounts, by field of ``TenantQuota``, in addition."""
        for name, amount in amounts.items():
            own, total, used = getattr(self.own, name), getattr(self.total, name), self.used(name)
            others = [(each.used(name), getattr(each.own, name)) for each in self._everyone if each is not self]
            if own is not None and used + amount > own:
                reason = f"this client's limit is {_text(own)}"
            elif total is not None and not fits(used + amount, own, others, total):
                reason = f"the server's limit is {_text(total)}, of which others use or may claim a part"
            else:
                continue
            raise QuotaExceeded(f"{name}: {_text(used)} in use and {_text(amount)} more requested, but {reason}")

    @contextlib.contextmanager
    def counted(self, **amounts: float) -> Iterator[None]:
        """Count amounts as used within the context."""
        for name, amount in amounts.items():
            self._counts[name] += amount
        try:
            yield
        finally:
            for name, amount in amounts.items():
                self._counts[name] -= amount

    def report(self) -> dict[str, float]:
        """Return what the tenant uses, by field of ``TenantQuota``."""
        return {name: self.used(name) for name in TenantQuota.model_fields}

    def load(self) -> tuple[float, float]:
        """Return the number of sandboxes and its limit: the tenant's or the server's, the one that is nearer."""
        total = sum(each.used("sandboxes") for each in self._everyone), self.total.sandboxes
        own = self.used("sandboxes"), self.own.sandboxes or 0
        return own if own[1] and own[0] / own[1] > total[0] / total[1] else total


def fits(wanted: float, own: float | None, others: Sequence[tuple[float, float | None]], total: float) -> bool:
    """Return whether a tenant may use ``wanted``.

    Args:
        wanted: what it uses then.
        own: its own limit, if any.
        others: what each other tenant uses, and its own limit, if any.
        total: the limit of all.
    """
    reserve = total / 2 / (1 + len(others))
    mine = reserve if own is None else min(reserve, own)
    theirs = sum(max(used, reserve if limit is None else min(reserve, limit)) for used, limit in others)
    return wanted <= mine or wanted + theirs <= total


def _text(amount: float) -> str:
    return str(int(amount)) if amount == int(amount) else f"{amount:g}"
