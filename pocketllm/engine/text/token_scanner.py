"""Finds the spellings of whole tokens in text: leftmost, then longest, in time linear in the text."""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping


class TokenScanner:
    """Cuts text at the spellings in `ids`. A regular expression of all spellings would try thousands at each place;
    this one stops only at characters that begin a spelling, and there tries one look-up a length."""

    def __init__(self, ids: Mapping[str, int]) -> None:
        self._ids = dict(ids)
        lengths: defaultdict[str, set[int]] = defaultdict(set)
        for text in ids:
            lengths[text[0]].add(len(text))
        self._lengths = {first: sorted(known, reverse=True) for first, known in lengths.items()}
        firsts = "".join(re.escape(first) for first in sorted(self._lengths))
        self._first = re.compile(f"[{firsts}]") if firsts else None

    def split(self, text: str) -> Iterator[str | int]:
        """Yield the plain stretches (never empty) and the ids of the tokens between them, in order."""
        done = 0
        for begin, end in self.spans(text):
            if begin > done:
                yield text[done:begin]
            yield self._ids[text[begin:end]]
            done = end
        if done < len(text):
            yield text[done:]

    def spans(self, text: str) -> Iterator[tuple[int, int]]:
        """Yield begin and end of every spelling, none overlapping."""
        if self._first is None:
            return
        place = self._first.search(text)
        while place:
            begin = place.start()
            end = next((begin + n for n in self._lengths[place.group()] if text[begin : begin + n] in self._ids), begin)
            if end > begin:
                yield begin, end
            place = self._first.search(text, max(end, begin + 1))
