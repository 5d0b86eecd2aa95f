"""Who holds the token that a call shows: by a line of a file, or by an issuer's signature."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from warpsmith import tokens
from warpsmith.errors import TokenRefused
from warpsmith.permissions import Caller
from warpsmith.service.oidc import Issuer
from warpsmith.settings import Settings


@dataclass(frozen=True)
class Holders:
    """Of the tokens that a server takes; at least one of the two is there."""

    file: tokens.TokenFile | None
    issuer: Issuer | None

    async def holder(self, metadata: Iterable[tuple[str, str | bytes]]) -> Caller:
        """Whose token a call shows.

        Raises:
            TokenRefused, NotPermitted, ServiceFault: as of `Issuer.holder`; or it shows none that is known.
        """
        token = tokens.shown(metadata)
        if self.file is not None and (found := self.file.holder(token)) is not None:
            return found
        if self.issuer is None:
            raise TokenRefused(tokens.REFUSED)
        return await self.issuer.holder(token)


def holders_of(settings: Settings) -> Holders | None:
    """Those of a service; None where it asks for no token.

    Raises:
        BadInput: the file holds no token, or the issuer cannot be used.
    """
    if settings.token_file is None and settings.oidc is None:
        return None
    return Holders(
        None if settings.token_file is None else tokens.TokenFile(settings.token_file),
        None if settings.oidc is None else Issuer(settings.oidc),
    )
