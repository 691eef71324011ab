"""What must not be told: paths of this machine, credentials, URL queries, foreign host names."""

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

SECRET_FLAG = re.compile(
    r"^-{0,2}[\w-]*(api[-_]?key|password|secret|authorization|header)$|^-H$|^--?(\w+[-_])?token$", re.I
)
SECRET_KEY = re.compile(r"(api[-_]?key|password|secret|authorization)$", re.I)
SECRET_VALUE = re.compile(r"\b(?:sk|hf|ghp|gho|glpat|xox[bp])[-_][A-Za-z0-9_\-]{12,}|(?<=Bearer )\S+", re.I)
SECRET_PAIR = re.compile(
    r"\b([\w-]*(?:api[-_]?key|password|secret|authorization|auth_token))([=:]\s*)([^\s,;&]+)", re.I
)
URL = re.compile(r"\b[a-z][a-z0-9+.-]*://[^\s\"'<>,]+", re.I)
ABSOLUTE_PATH = re.compile(r"(?<![\w./:~<\\-])(?:~|(?=/))(?:/[^\s/:,;=\"'()<>\[\]{}|]+)+/?")
REDACTED = "***"


def redact(argv: Sequence[str]) -> list[str]:
    """A command line without credentials, paths, URL queries or foreign host names; as long as the given one."""
    told: list[str] = []
    secret_follows = False
    for position, word in enumerate(argv):
        name, equals, _ = word.partition("=")
        if secret_follows:
            told.append(REDACTED)
            secret_follows = False
        elif position == 0:
            told.append(Path(word).name)
        elif SECRET_FLAG.match(name):
            told.append(f"{name}={REDACTED}" if equals else word)
            secret_follows = not equals and name.startswith("-")
        else:
            told.append(scrub_text(word))
    return told


def scrub(value: Any) -> Any:
    """A JSON-like value with every text in it passed through scrub_text; keys stay."""
    if isinstance(value, str):
        return scrub_text(value)
    if isinstance(value, Mapping):
        return {key: REDACTED if secret(key, item) else scrub(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [scrub(item) for item in value]
    return value


def secret(key: Any, value: Any) -> bool:
    """Whether a document entry is a credential by its name."""
    return isinstance(value, str) and bool(value) and bool(SECRET_KEY.search(str(key)))


def scrub_text(text: str) -> str:
    """A text whose paths are file names, whose URLs carry no user, query or foreign host, without credentials."""
    if "/" not in text and "=" not in text and ":" not in text and not SECRET_VALUE.search(text):
        return text
    told: list[str] = []
    end = 0
    for url in URL.finditer(text):
        told += (scrub_words(text[end : url.start()]), redact_url(url.group()))
        end = url.end()
    return "".join((*told, scrub_words(text[end:])))


def scrub_words(text: str) -> str:
    """scrub_text of a text without URLs."""
    text = SECRET_VALUE.sub(REDACTED, text)
    text = SECRET_PAIR.sub(lambda match: match.group(1) + match.group(2) + REDACTED, text)
    return ABSOLUTE_PATH.sub(lambda match: shorten_path(match.group()), text)


def shorten_path(path: str) -> str:
    """The file name of a path of this machine; a text that only looks like one (`/v1/completions`) stays.

    It is a path of this machine when it begins with `~` or its first folder exists here.
    """
    parts = path.rstrip("/").split("/")
    if path.startswith("~") or (len(parts) > 1 and parts[1] and os.path.isdir("/" + parts[1])):
        return parts[-1]
    return path


def redact_url(url: str) -> str:
    """A URL without user, password, query and fragment; a host that is not this machine is hashed, a file: its name."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        return f"{url.partition('://')[0]}://{REDACTED}"
    if parts.scheme == "file":
        return f"file:{Path(parts.path).name}"
    if host and host not in ("localhost", "::1", "0.0.0.0") and not host.startswith("127."):
        host = "host-" + hashlib.sha256(host.encode()).hexdigest()[:8]
    if ":" in host:
        host = f"[{host}]"
    return f"{parts.scheme}://{host}{f':{port}' if port else ''}{parts.path}"
