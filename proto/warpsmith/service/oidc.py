"""Tokens that an OpenID Connect issuer signs: who a caller is, by the login that its company has already.

The one idea: PyJWT verifies, with the keys that the issuer publishes; what is ours is which claims make a `Caller`, and
that a token which was verified counts until it expires, also while the issuer is away. A refusal says why, and never
quotes the token.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import time
import urllib.request
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlsplit

from warpsmith import local_sockets
from warpsmith.errors import BadInput, NotPermitted, ServiceFault, TokenRefused
from warpsmith.permissions import Caller, Right
from warpsmith.settings import OidcSettings

log = logging.getLogger("warpsmith")

DISCOVERY = "/.well-known/openid-configuration"
"""Below the issuer's address: where its keys are (OpenID Connect Discovery 1.0, section 4)."""
ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
"""Public keys only: with a shared secret whoever verifies could sign."""
FETCH_SECONDS = 5.0
"""Longest wait for an answer of the issuer."""
PAUSE_SECONDS = 5.0
"""After an answer that did not come, before the issuer is asked again."""
REFRESH_SECONDS = 10.0
"""Between two looks for a key that is not known: who makes keys up must not have the issuer asked for each."""
KEPT_TOKENS = 10_000
"""Verified tokens that are remembered."""
NAME_CHARACTERS = 200


class Issuer:
    """Verifies tokens of one issuer. `holder` on the event loop.

    Raises:
        BadInput: PyJWT is missing, or the issuer's address is in plain text.
    """

    def __init__(self, settings: OidcSettings) -> None:
        if find_spec("jwt") is None:
            raise BadInput("WARPSMITH_OIDC_ISSUER needs PyJWT: pip install 'warpsmith[oidc]'")
        _require_secret(settings.issuer)
        self._settings = settings
        self._keys: Any = None
        self._asked_again_at = 0.0
        self._verified: dict[bytes, tuple[Caller, float]] = {}
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="oidc")
        self._threads.submit(self._look)

    async def holder(self, token: str) -> Caller:
        """Who shows a token, and what it may do.

        Raises:
            TokenRefused: it does not count; says why. NotPermitted: it names no right. ServiceFault: the issuer, whose
            keys are needed, does not answer.
        """
        name = hashlib.sha256(token.encode()).digest()
        known = self._verified.pop(name, None)
        if known is None or known[1] <= time.time():
            known = await asyncio.get_running_loop().run_in_executor(self._threads, self._read, token)
            if len(self._verified) >= KEPT_TOKENS:
                self._verified.pop(next(iter(self._verified)))  # the one that nobody has shown for longest
        self._verified[name] = known
        return known[0]

    def _look(self) -> None:
        """Fetches the keys before the first caller needs them."""
        try:
            self._published().get_jwk_set()
        except Exception as error:  # whatever it is, it says so again to who calls
            log.warning("%s", self._away(error))

    def _read(self, token: str) -> tuple[Caller, float]:
        """The holder of a token, and until when it counts, in seconds since the epoch."""
        import jwt

        told = self._settings
        try:
            key = self._key(token)
            claims = jwt.decode(
                token,
                key,
                algorithms=ALGORITHMS,
                audience=told.audience,
                issuer=told.issuer,
                leeway=told.leeway_seconds,
                options={"require": ["exp", "iss", "aud"]},
            )
        except jwt.ExpiredSignatureError:
            raise TokenRefused(f"the token has expired: get a new one of {told.issuer}") from None
        except jwt.ImmatureSignatureError:
            late = f"by more than {told.leeway_seconds:.0f} s ahead of this machine's"
            raise TokenRefused(f"the token is not valid yet: its issuer's clock is {late}") from None
        except jwt.InvalidAudienceError:
            raise TokenRefused(f"the token is for another audience than {told.audience}") from None
        except jwt.InvalidIssuerError:
            raise TokenRefused(f"the token is of another issuer than {told.issuer}") from None
        except jwt.MissingRequiredClaimError as error:
            raise TokenRefused(f"the token lacks the claim {error.claim!r}") from None
        except jwt.InvalidSignatureError:
            raise TokenRefused("the token was changed: its signature is not right") from None
        except jwt.InvalidAlgorithmError:
            raise TokenRefused(f"the token is signed in another way than {told.issuer} tells of its key") from None
        except jwt.InvalidTokenError:
            raise TokenRefused("the token is no line of this server's file, and no JWT that can be read") from None
        return caller_of(claims, told), float(claims["exp"]) + told.leeway_seconds

    def _key(self, token: str) -> Any:
        """The published key that a token says it is signed with; looked for again where it is not known."""
        import jwt

        jwt.get_unverified_header(token)
        if time.monotonic() < self._asked_again_at and not self._has_keys():
            raise ServiceFault(f"{self._settings.issuer} was just asked for its keys in vain: {_WHAT_THEN}")
        try:
            return self._published().get_signing_key_from_jwt(token)
        except jwt.PyJWKClientConnectionError as error:
            raise self._away(error) from None
        except jwt.PyJWKClientError:
            raise TokenRefused(f"the token is signed with no key that {self._settings.issuer} publishes") from None
        except (OSError, ValueError, jwt.PyJWKSetError) as error:  # of the discovery, or no key set
            raise self._away(error) from None

    def _published(self) -> Any:
        """PyJWT's client of the issuer's keys, whose place the issuer's own document names."""
        import jwt

        if self._keys is None:
            place = self._settings.issuer.rstrip("/") + DISCOVERY
            with urllib.request.urlopen(place, timeout=FETCH_SECONDS) as answer:
                found = json.loads(answer.read(1 << 20))
            if not isinstance(found, dict) or found.get("issuer") != self._settings.issuer:
                raise ValueError(f"{place} is of another issuer")
            try:
                _require_secret(str(found.get("jwks_uri", "")))
            except BadInput as error:
                raise ValueError(str(error)) from None
            self._keys = jwt.PyJWKClient(
                found["jwks_uri"], timeout=FETCH_SECONDS, cooldown_duration=REFRESH_SECONDS, lifespan=300
            )
        return self._keys

    def _has_keys(self) -> bool:
        return self._keys is not None and self._keys.jwk_set_cache.get() is not None

    def _away(self, error: Exception) -> ServiceFault:
        self._asked_again_at = time.monotonic() + PAUSE_SECONDS
        return ServiceFault(f"{self._settings.issuer} gives no keys ({error}): {_WHAT_THEN}")


_WHAT_THEN = "its tokens that have not been seen before cannot be verified now; try again later"


def caller_of(claims: Mapping[str, Any], settings: OidcSettings) -> Caller:
    """Who the verified claims of a token are.

    Raises:
        TokenRefused: they name nobody. NotPermitted: they name no right.
    """
    name = _claim(claims, settings.name_claim)
    if not isinstance(name, str) or not 0 < len(name) <= NAME_CHARACTERS or not name.isprintable():
        raise TokenRefused(f"the token names nobody: its claim {settings.name_claim!r} is no text")
    shown = _claim(claims, settings.role_claim)
    roles = shown.split() if isinstance(shown, str) else shown if isinstance(shown, list) else []
    rights = [right for right in Right if settings.role_prefix + right.word in roles]
    if not rights:
        wanted = ", ".join(settings.role_prefix + right.word for right in Right)
        raise NotPermitted(f"the token of {name} has no role: its claim {settings.role_claim!r} names none of {wanted}")
    project = _claim(claims, settings.project_claim)
    if project is not None and (not isinstance(project, str) or not project.isprintable()):
        raise TokenRefused(f"the token of {name} names no single project in its claim {settings.project_claim!r}")
    return Caller(name, max(rights), project or "")


def _claim(claims: Mapping[str, Any], name: str) -> Any:
    """A claim by its name, or by the names that lead to it with dots between; None where there is none."""
    if name in claims:
        return claims[name]
    found: Any = claims
    for part in name.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def _require_secret(address: str) -> None:
    """Refuses keys that anybody on the way could exchange.

    Raises:
        BadInput: the address is neither by TLS nor of this machine.
    """
    parts = urlsplit(address)
    if parts.scheme == "https" and parts.hostname:
        return
    if parts.scheme == "http" and local_sockets.is_loopback(parts.netloc):
        return
    raise BadInput(f"{address or 'nothing'}: an issuer is asked by https:// only; see WARPSMITH_OIDC_ISSUER")
