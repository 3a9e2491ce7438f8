"""What can go wrong, in one hierarchy. Each message says what happened and what to do; `exit_code` ends the command."""

from __future__ import annotations


class EngineError(Exception):
    """Base of all errors with a message for a person."""

    exit_code = 1


class UsageError(EngineError):
    """Wrong settings. Nothing was started."""

    exit_code = 2


class ModelNotFound(UsageError):
    """The model named is neither known, nor a file, nor a folder that can be used."""


class UnsupportedModel(UsageError):
    """The model is intact, but of a kind that this engine does not compute."""


class ModelBroken(UsageError):
    """A model file is missing, truncated, or not what its name says."""


class InvalidConfig(UsageError):
    """Settings that do not fit each other, the model or the machine."""


class NothingNamed(InvalidConfig):
    """A drafter needs a model or head, and none is named or ships."""


class DownloadFailed(EngineError):
    """A known model could not be fetched, or what came is not what was pinned. The cache is as it was."""


class TokenizerError(EngineError):
    """The model's vocabulary or chat template cannot be used."""


class TemplateError(EngineError):
    """The chat template refused these messages, or failed on them."""


class PortUnavailable(EngineError):
    """The address to listen on is taken or not ours."""


class EngineDown(EngineError):
    """The model process has ended; no request can be answered any more. The message is the cause."""


class CollectiveError(EngineError):
    """Ranks of one model could not exchange what they computed; the model cannot go on, nor be trusted."""


class CollectiveTimeout(CollectiveError):
    """A rank did not arrive at an operation in time."""


class RankLost(CollectiveError):
    """The process of a rank has ended."""


class RanksDisagree(CollectiveError):
    """Ranks of one model do not do, or do not have, the same."""
