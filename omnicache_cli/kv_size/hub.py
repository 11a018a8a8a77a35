"""A model's small files from the hub, through huggingface_hub's own cache: the only place of this
room that uses the network, and only for a hub id.
"""

import logging
import socket
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

from omnicache_cli import advice
from omnicache_cli.errors import BadInputError

BESIDE = ("hf_quant_config.json", "preprocessor_config.json")
"""What vLLM and the processors read beside config.json, where a model has it."""

CONNECT_SECONDS = 5.0
"""huggingface_hub retries for half a minute; a hub that does not answer this fast is away."""


def config_from_hub(model: str) -> Path:
    """config.json of a hub id. BadInputError: no such model, no access to it, or no network."""
    try:
        import huggingface_hub
    except ImportError:
        raise BadInputError(
            f"{model} is no file here; as a hub id it needs huggingface_hub: "
            f"{advice.install_extra('kv-size')}"
        ) from None
    logging.getLogger("huggingface_hub").setLevel(logging.CRITICAL)
    from huggingface_hub import constants, errors

    endpoint = constants.ENDPOINT
    is_away = constants.HF_HUB_OFFLINE or not _answers(endpoint)
    try:
        path = Path(huggingface_hub.hf_hub_download(model, "config.json", local_files_only=is_away))
        for name in BESIDE:
            _fetch_if_there(model, name, is_away=is_away)
    except errors.LocalEntryNotFoundError:
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"{endpoint} is not reached"
        raise BadInputError(
            f"{model} is no file here and no model in the local cache, and {why}; download its "
            "config.json and name the folder"
        ) from None
    except errors.GatedRepoError:
        raise BadInputError(
            f"{model} is gated and this account may not read it; accept its terms and log in, or "
            "name a folder"
        ) from None
    except errors.RepositoryNotFoundError:
        raise BadInputError(
            f"{model} is no file here and no model on {endpoint} that this account may see; check "
            "the name"
        ) from None
    except errors.EntryNotFoundError:
        raise BadInputError(f"{model} has no config.json on {endpoint}; name a folder") from None
    except Exception as error:
        reason = str(error).strip().splitlines()
        raise BadInputError(
            f"{model} is no file here, and its config.json cannot be fetched from {endpoint}: "
            f"{type(error).__name__}{': ' + reason[0] if reason else ''}; name a folder"
        ) from None
    return path


def _fetch_if_there(model: str, name: str, *, is_away: bool) -> None:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    try:
        hf_hub_download(model, name, local_files_only=is_away)
    except EntryNotFoundError:  # also what is not in the cache
        return


def _answers(endpoint: str) -> bool:
    """A proxy, where there is one, knows better than a connection of our own."""
    address = urlsplit(endpoint)
    if address.hostname is None or address.scheme in getproxies():
        return True
    port = address.port or (80 if address.scheme == "http" else 443)
    try:
        socket.create_connection((address.hostname, port), CONNECT_SECONDS).close()
    except OSError:
        return False
    return True
