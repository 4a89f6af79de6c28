"""How `vecd embed` ends before its output is complete. Every message names the file or server that it is about."""


class EmbedError(Exception):
    """Raised when an input, the output, the journal or the server of the run does not fit. Exit code 2."""


class FieldMissing(EmbedError):
    """Raised when an input has nowhere the field of the texts. Of a stream this is known at its header or its end."""


class OutputLocked(EmbedError):
    """Raised when another run is making the output."""


class RunEnded(Exception):
    """Raised when a run ends with rows left to do. The same command may resume it. Exit code 1."""


class ServerLost(RunEnded):
    """Raised when the server refuses, serves nothing, or serves another model. No other input would fare better."""


class ModelChanged(ServerLost):
    """Raised when the server has another model than at the beginning of the run: what is not committed is lost."""


class OtherIdentity(ServerLost):
    """Raised when no response comes that is of the identity that the run began with. What is written is right."""
