"""Every exception that is raised on purpose.

    PocketLLMError                      exit code 2 unless a line says otherwise
    ├── OptionError                     a flag, environment variable or project file value cannot be used
    ├── ModelNotFoundError              no such catalog name, file, or file of a repository
    ├── CheckpointError                 a checkpoint is not what it claims to be; names the file
    │   └── GGUFError                   ... and the field of the GGUF that is wrong
    ├── UnsupportedFeatureError         what was asked cannot run here; carries every reason
    ├── RequestError                    one request cannot be served as asked           HTTP 400
    │   └── ContextLengthError          prompt and answer do not fit the context        HTTP 400
    ├── ConstraintError                 an answer cannot go on as its grammar demands   HTTP 422
    ├── QueueFullError                  come back later                                 HTTP 503
    ├── MachineError                    a port, a folder or a process refused           exit code 2
    ├── RecordError                     a run record or a fixture cannot be read or written
    └── NotJudgedError                  the instrument could not decide                 exit code 3

A message says what, where and what to do, in one sentence; no traceback is shown for any of these.
Anything else that escapes is our own bug: it keeps its traceback and ends with exit code 70.
"""

from collections.abc import Sequence


class PocketLLMError(Exception):
    """Root of everything raised on purpose; `exit_code` is what a command ends with."""

    exit_code = 2


class OptionError(PocketLLMError):
    """A flag, an environment variable or a project file value cannot be used."""


class ModelNotFoundError(PocketLLMError):
    """Nothing answers to this model name or path."""


class CheckpointError(PocketLLMError):
    """A checkpoint is broken or incomplete; the message names the file."""


class GGUFError(CheckpointError):
    """A GGUF file is malformed; the message names the field."""


class UnsupportedFeatureError(PocketLLMError):
    """What was asked cannot run here.

    `reasons` holds all of them, each naming the feature, who lacks it and what would serve it.
    """

    def __init__(self, subject: str, reasons: Sequence[str]) -> None:
        super().__init__(f"{subject}: {'; '.join(reasons)}")
        self.subject = subject
        self.reasons = tuple(reasons)


class RequestError(PocketLLMError):
    """One request cannot be served as asked: `param` names the field, `code` is for machines."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class ContextLengthError(RequestError):
    """Prompt and answer do not fit the context."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message, param=param, code="context_length_exceeded")


class ConstraintError(PocketLLMError):
    """An answer that has begun cannot obey its grammar any more."""


class QueueFullError(PocketLLMError):
    """Too many requests are waiting; the client should come back later."""


class MachineError(PocketLLMError):
    """A port, a folder or a process of this machine refused."""


class RecordError(PocketLLMError):
    """A run record or a fixture cannot be read or written."""


class NotJudgedError(PocketLLMError):
    """The instrument could not decide: no verdict, and never a pass."""

    exit_code = 3
