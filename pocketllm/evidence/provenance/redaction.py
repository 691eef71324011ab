"""What must not be told: paths of this machine, credentials, URL queries, foreign host names."""

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

NAMES = (
    r"(?:api[-_]?key|access[-_]?key|private[-_]?key|passw(?:or)?d|passphrase|secret|authorization"
    r"|(?:access|api|auth|bearer|hf|hub|private|refresh|session)[-_]token)"
)
"""What credentials are called, whatever stands before; `token` alone may be a token id."""
SECRET_FLAG = re.compile(rf"^-{{0,2}}[\w-]*(?:{NAMES}|header)$|^-H$|^--?(\w+[-_])?token$", re.I)
SECRET_KEY = re.compile(rf"{NAMES}$", re.I)
SECRET_VALUE = re.compile(
    r"\b(?:sk|hf|ghp|gho|github_pat|glpat|xox[bp])[-_][A-Za-z0-9_\-]{12,}|\bAKIA[0-9A-Z]{16}\b"
    r"|\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*|(?<=Bearer )\S+",
    re.I,
)
SCHEME = r"(?:(?:Basic|Bearer|Digest|Token)\s+)?"
QUOTED = r"\"[^\"]+\"|'[^']+'"
SECRET_PAIR = re.compile(rf"\b([\w-]*{NAMES})([\"']?\s*[=:]\s*)({QUOTED}|{SCHEME}[^\s,;&\"']+)", re.I)
SECRET_IN_COMMAND = re.compile(
    rf"(?<![\w-])(--?[\w-]*{NAMES}|--?(?:\w+[-_])?token)([=\s]\s*)({QUOTED}|[^\s\"'=-][^\s\"']*)", re.I
)
"""A flag and its value inside a text that holds a whole command line."""
URL = re.compile(r"\b[a-z][a-z0-9+.-]*://[^\s\"'<>,?#]*(?:[?#][^\s\"'<>]*)?", re.I)
"""A comma ends it, but not in its query: what follows there may belong to it."""
HOST_NAMES = r"(?:host(?:s|name)?|addr(?:ess)?|rpc|endpoint)"
HOST_FLAG = re.compile(rf"^--?(?:[\w-]*[-_])?{HOST_NAMES}$", re.I)
HOST_IN_COMMAND = re.compile(rf"(?<![\w-])(--?(?:[\w-]*[-_])?{HOST_NAMES})([=\s]\s*)([^\s\"'=-][^\s\"']*)", re.I)
"""A flag and the machine that it names."""
ADDRESS = re.compile(r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?=:\d)")
"""An IPv4 address with a port; without one it could be a version."""
HOST_AND_PORT = re.compile(r"(\[[^\]]*\]|[^:,]+)((?::\d+)?)(?=,|$)")
TOLD_HOST = re.compile(r"host-[0-9a-f]{8}")
ABSOLUTE_PATH = re.compile(r"(?<![\w./~<\\-])(?:~[\w.-]*|(?=/))(?:/[^\s/:,;=\"'()<>\[\]{}|]+)+/*")
WINDOWS_PATH = re.compile(r"\b[A-Za-z]:\\(?:[^\\\s\"'<>|]+\\)*")
HOMES = ("home", "root", "Users")
"""First folders of paths that name a user, on this machine or on a server's."""
CONTROL = re.compile(r"[^\t\n\x20-\x7e\xa0-\U0010ffff]")
REDACTED = "***"


def redact(argv: Sequence[str]) -> list[str]:
    """A command line without credentials, paths, URL queries or foreign host names; as long as the given one."""
    return [*(Path(word).name for word in argv[:1]), *scrub_list(argv[1:])]


def scrub_list(values: Sequence[Any]) -> list[Any]:
    """The items of a list scrubbed; what follows a flag that takes a credential is one, as in a command line."""
    told: list[Any] = []
    secret_follows = host_follows = False
    for value in values:
        name, equals, _ = value.partition("=") if isinstance(value, str) else ("", "", "")
        if secret_follows and isinstance(value, str):
            told.append(REDACTED)
            secret_follows = False
        elif SECRET_FLAG.match(name):
            told.append(f"{name}={REDACTED}" if equals else value)
            secret_follows = not equals and name.startswith("-")
        elif host_follows and isinstance(value, str) and not value.startswith("-"):
            told.append(redact_hosts(value))
            host_follows = False
        else:
            host_follows = not equals and bool(HOST_FLAG.match(name))
            told.append(scrub(value))
    return told


def scrub(value: Any) -> Any:
    """A JSON-like value with every text in it passed through scrub_text; keys stay."""
    if isinstance(value, str):
        return scrub_text(value)
    if isinstance(value, Mapping):
        return {key: REDACTED if secret(key, item) else scrub(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return scrub_list(value)
    return value


def secret(key: Any, value: Any) -> bool:
    """Whether a document entry is a credential by its name."""
    return isinstance(value, str) and bool(value) and bool(SECRET_KEY.search(str(key)))


def scrub_text(text: str) -> str:
    """A text whose paths are file names, whose URLs carry no user, query or foreign host, without credentials.

    Control characters become spaces: a server's words must not steer the terminal or the CI log that shows them.
    """
    text = CONTROL.sub(" ", text)
    if not any(mark in text for mark in "/=:-") and not SECRET_VALUE.search(text):
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
    for pattern in (SECRET_PAIR, SECRET_IN_COMMAND):
        text = pattern.sub(lambda match: match.group(1) + match.group(2) + REDACTED, text)
    text = HOST_IN_COMMAND.sub(lambda match: match.group(1) + match.group(2) + redact_hosts(match.group(3)), text)
    text = ADDRESS.sub(lambda match: redact_host(match.group()), text)
    text = WINDOWS_PATH.sub("", text)
    return ABSOLUTE_PATH.sub(lambda match: shorten_path(match.group()), text)


def shorten_path(path: str) -> str:
    """The file name of a path of this machine; a text that only looks like one (`/v1/completions`) stays.

    It is a path of a machine when it begins with `~`, or its first folder holds homes or exists here.
    """
    parts = path.rstrip("/").split("/")
    first = parts[1] if len(parts) > 1 else ""
    if path.startswith("~") or first in HOMES or (first and os.path.isdir("/" + first)):
        return parts[-1]
    return path


def redact_host(host: str) -> str:
    """A host name or address as it is told: hashed, where it is not this machine and not hashed already."""
    local = host in ("", "localhost", "::", "::1", "[::]", "[::1]", "0.0.0.0") or host.startswith("127.")
    if local or TOLD_HOST.fullmatch(host):
        return host
    return "host-" + hashlib.sha256(host.encode()).hexdigest()[:8]


def redact_hosts(text: str) -> str:
    """The value of a flag that names machines: hosts, each with its port, between commas; a number is no host."""
    if "://" in text:
        return scrub_text(text)
    if text.isdigit():
        return text
    if text.count(":") > 1 and not set("[],.") & set(text):  # IPv6
        return redact_host(text)
    return HOST_AND_PORT.sub(lambda match: redact_host(match.group(1)) + match.group(2), text)


def redact_url(url: str) -> str:
    """A URL without user, password, query and fragment; a host that is not this machine is hashed, a file: its name."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        return f"{url.partition('://')[0]}://{REDACTED}"
    if parts.scheme == "file":
        return f"file:{Path(parts.path).name}"
    host = redact_host(host)
    if ":" in host:
        host = f"[{host}]"
    return f"{parts.scheme}://{host}{f':{port}' if port else ''}{parts.path}"
