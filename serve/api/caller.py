"""Who a request comes from."""

import asyncio
from dataclasses import dataclass

LEASE_FIELD = "shoal_lease"  # of a request that comes over a handle
LEASE_S = 15.0  # a client in Python that has not been heard of for so long is gone
RENEW_S = 4.0  # how often it speaks up while it waits for answers


class Lease:
    """One client's word that it still waits. Ray tells nobody that the owner of a handle's call has died."""

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        self.expires = asyncio.get_running_loop().time() + LEASE_S


class Leases:
    """Those of the clients that call over a deployment handle, by the names that they gave themselves."""

    def __init__(self) -> None:
        self._leases: dict[str, Lease] = {}

    def get(self, name: str) -> Lease:
        """Calling renews, too."""
        self._forget()
        lease = self._leases.setdefault(name, Lease())
        lease.renew()
        return lease

    def renew(self, name: str) -> None:
        if (lease := self._leases.get(name)) is not None:
            lease.renew()

    def _forget(self) -> None:
        now = asyncio.get_running_loop().time()
        self._leases = {name: lease for name, lease in self._leases.items() if lease.expires > now}


@dataclass(frozen=True)
class Caller:
    """`tenant`: whose share of the engine its requests take, "" where nobody is told from another. Without a lease it
    is taken to wait as long as its connection stands."""

    tenant: str = ""
    lease: Lease | None = None
