"""Ends a text at the first stop string, however the text is cut into pieces."""

from collections.abc import Sequence

from pocketllm.errors import RequestError


class StopChecker:
    """Passes text on up to the first stop string and holds back an end that may become one.

    The first stop string is the one that is complete first, reading character by character; of several complete at
    the same character the longest. So the outcome does not depend on the pieces. The stop string is not passed on.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if "" in stops:
            raise RequestError(f"stop string {list(stops).index('')} is empty", param="stop")
        self._stops = tuple(stops)
        self._longest = max(map(len, stops), default=1)
        self._held = ""
        self._is_done = False

    def push(self, text: str) -> tuple[str, str | None]:
        """Text to pass on and the stop string that ended it, if one did; nothing comes after that."""
        if self._is_done:
            return "", None
        if not self._stops:
            return text, None
        buffer = self._held + text
        found = [(begin + len(stop), begin, stop) for stop in self._stops if (begin := buffer.find(stop)) >= 0]
        if found:
            _, begin, stop = min(found)
            self._held, self._is_done = "", True
            return buffer[:begin], stop
        keep = self._num_held(buffer)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep], None

    def flush(self) -> str:
        """What was held back, because the text ended before it became a stop string."""
        held, self._held = self._held, ""
        return held

    def _num_held(self, buffer: str) -> int:
        """Length of the longest end of `buffer` that begins a stop string."""
        longest = min(self._longest - 1, len(buffer))
        return next((n for n in range(longest, 0, -1) if self._begins_a_stop(buffer[-n:])), 0)

    def _begins_a_stop(self, end: str) -> bool:
        return any(stop.startswith(end) for stop in self._stops)
