"""Stop strings over a stream of text."""


class StopChecker:
    """Lets text through until a stop string is complete, and holds back what may be the beginning of one.

    The match that is complete first wins (of two that end together, the longer), however the text is cut.
    """

    def __init__(self, stops: tuple[str, ...], include_stop: bool = False) -> None:
        self._stops = stops
        self._include_stop = include_stop
        self._held = ""
        self.matched = False

    def add(self, text: str) -> str:
        """The text that may be shown now. After a match nothing more is let through."""
        if self.matched:
            return ""
        if not self._stops:
            return text
        pending = self._held + text
        if span := self._find(pending):
            self.matched, self._held = True, ""
            return pending[: span[1] if self._include_stop else span[0]]
        shown = len(pending) - self._partial(pending)
        self._held = pending[shown:]
        return pending[:shown]

    def flush(self) -> str:
        """What was held back, when the text ends without a match."""
        text, self._held = self._held, ""
        return text

    def _find(self, text: str) -> tuple[int, int] | None:
        """(start, end) of the match that ends first."""
        starts = [(text.find(stop), stop) for stop in self._stops]
        spans = [(start, start + len(stop)) for start, stop in starts if start >= 0]
        return min(spans, key=lambda span: (span[1], span[0]), default=None)

    def _partial(self, text: str) -> int:
        """Length of the longest end of the text that begins a stop string."""
        longest = min(len(text), max(map(len, self._stops)) - 1)
        for length in range(longest, 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0
