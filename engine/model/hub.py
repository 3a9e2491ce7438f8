"""Models by hub id, such as `Qwen/Qwen3-0.6B`, kept in the hub library's own cache."""

from __future__ import annotations

import logging
import re
from pathlib import Path

from engine.errors import DownloadFailed, UnsupportedModel

log = logging.getLogger(__name__)

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt")


def is_hub_id(model: str) -> bool:
    """Whether `model` has the form of one: OWNER/NAME."""
    return _ID.fullmatch(model) is not None


def download(repository: str) -> Path:
    """The folder of a hub repository, fetched where it is not cached.

    Where the hub cannot be reached, a former download is used. `HF_ENDPOINT`, `HF_TOKEN`, `HF_HOME` and
    `HF_HUB_OFFLINE` mean what they mean to the hub library.

    Raises:
        DownloadFailed: the hub cannot be reached and nothing is cached, or it refuses.
        UnsupportedModel: the repository has no weights that this engine reads.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

    log.info("looking for %s on the hub", repository)
    try:
        folder = Path(snapshot_download(repository, allow_patterns=list(_FILES)))
    except (GatedRepoError, RepositoryNotFoundError) as error:
        reason = " ".join(str(error).split())[:300]
        raise DownloadFailed(f"model: the hub does not give '{repository}': {reason}") from error
    except LocalEntryNotFoundError as error:
        raise DownloadFailed(
            f"model: '{repository}' is no file or folder here, and the hub cannot be reached "
            f"({' '.join(str(error).split())[:200]}); give a local copy, or set HF_ENDPOINT to a mirror"
        ) from error
    except (OSError, ValueError) as error:
        raise DownloadFailed(f"model: '{repository}' could not be fetched: {error}") from error
    if not (folder / "config.json").is_file() or not any(folder.glob("*.safetensors")):
        raise UnsupportedModel(f"model: '{repository}' has no config.json with safetensors weights")
    return folder
