"""The language model that a service's settings name: a client of the server that answers for it."""

from __future__ import annotations

from warpsmith.errors import BadInput
from warpsmith.models.language_model import LanguageModel
from warpsmith.settings import ModelSettings


def connect(settings: ModelSettings) -> LanguageModel:
    """A client of the server that the settings name.

    Raises:
        BadInput: the library is not installed, or the server says that the settings are wrong (address, model, key).
    """
    try:
        from warpsmith.models.openai_client import OpenAiClient
    except ModuleNotFoundError as error:
        if error.name not in ("openai", "httpx"):
            raise
        raise BadInput(
            f"a language model needs the library {error.name}, which is not installed: pip install 'warpsmith[model]'"
        ) from error
    client = OpenAiClient(settings)
    client.check()
    return client
