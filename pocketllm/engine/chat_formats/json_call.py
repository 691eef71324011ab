"""A call written as a JSON object: {"name": …, "arguments": {…}}, in either order."""

from collections.abc import Sequence

from pocketllm.engine.chat_formats.reading import Reader, Steps, decoded

ARGUMENTS = ("arguments", "parameters")


def json_call(reader: Reader, *, only_known: bool = False) -> Steps[bool]:
    """Read one call and tell it, its arguments as they come once the name is known.

    False, and nothing read, where this is no call; only_known: nor is one of a tool that was not offered.
    """
    place = reader.mark()
    is_told = yield from _members(reader, only_known)
    if not is_told:
        reader.rewind(place)
    reader.forget()
    return is_told


def _members(reader: Reader, only_known: bool) -> Steps[bool]:
    """The members of the object; whether a call was told."""
    name, early, is_told = None, None, False
    yield from reader.skip_blanks()
    if not (yield from reader.takes("{")):
        return False
    while True:
        yield from reader.skip_blanks()
        if (yield from reader.takes("}")):
            break
        key = yield from _text(reader)
        yield from reader.skip_blanks()
        if key is None or not (yield from reader.takes(":")):
            return is_told
        if key == "name" and name is None:
            name = yield from _text(reader)
            if not name or (only_known and name not in reader.tools):
                return False
            if early is not None:
                is_told = _tell(reader, name, early)
        elif key in ARGUMENTS and name is not None and not is_told:
            is_told = True
            reader.begin_call(name)
            if not (yield from _arguments(reader)):
                return True
        else:
            pieces: list[str] = []
            if not (yield from reader.json_value(pieces.append)):
                return is_told
            if key in ARGUMENTS and early is None:
                early = "".join(pieces)
        yield from reader.skip_blanks()
        if not (yield from reader.takes(",")) and (yield from reader.peek()) != "}":
            return is_told
    if name is not None and not is_told:
        is_told = _tell(reader, name, "{}")
    return is_told


def _arguments(reader: Reader) -> Steps[bool]:
    """Arguments of a call that has begun: an object as it comes, or a JSON text of one, whole."""
    yield from reader.skip_blanks()
    if (yield from reader.peek()) == "{":
        return (yield from reader.json_value(reader.arguments))
    pieces: list[str] = []
    is_whole = yield from reader.json_value(pieces.append)
    reader.arguments(plain_arguments("".join(pieces)))
    return is_whole


def _tell(reader: Reader, name: str, arguments: str) -> bool:
    reader.begin_call(name)
    reader.arguments(plain_arguments(arguments))
    return True


def plain_arguments(text: str) -> str:
    """Arguments that are spelled as null, or as a text that holds JSON, as the object they mean."""
    value = decoded(text)
    if isinstance(value, str):
        return value.strip() or "{}"
    return "{}" if value is None and text.strip() == "null" else text


def _text(reader: Reader) -> Steps[str | None]:
    """A JSON string as a text; None where there is none."""
    yield from reader.skip_blanks()
    if (yield from reader.peek()) != '"':
        return None
    pieces: list[str] = []
    is_whole = yield from reader.json_value(pieces.append)
    value = decoded("".join(pieces)) if is_whole else None
    return value if isinstance(value, str) else None


def json_calls(reader: Reader, separators: Sequence[str]) -> Steps[bool]:
    """One call or several with separators between; False, and nothing read, where there is none."""
    is_any = False
    while (yield from json_call(reader, only_known=True)):
        is_any = True
        yield from reader.skip_blanks()
        for separator in separators:
            if (yield from reader.takes(separator)):
                break
        else:
            break
    return is_any
