"""The moments of training that a snapshot is wanted of."""

from collections.abc import Callable

from shardjax.embed.outline import Outline


class Moments:
    """Outlines of moments that have been announced, until somebody takes them.

    A moment is the number of the training plan after which it is.

    Args:
      make: makes the outline of now, when so many plans have been made and none after.
    """

    def __init__(self, make: Callable[[], Outline]):
        self._make = make
        self._announced: set[int] = set()
        self._outlines: dict[int, Outline] = {}

    def announce(self, moment: int, planned: int) -> int:
        """Asks for an outline of a moment, or of now if that is past; returns which."""
        moment = max(moment, planned)
        self._announced.add(moment)
        self.reached(planned)
        return moment

    def is_end(self, moment: int) -> bool:
        """Whether a window has to end there."""
        return moment in self._announced

    def reached(self, planned: int) -> None:
        """Makes the outline of now, if it is wanted: so many plans have been made."""
        if planned in self._announced:
            self._announced.remove(planned)
            self._outlines[planned] = self._make()

    def take(self, moment: int) -> Outline | None:
        """The outline of a moment, if there is one; earlier ones are of no use any more."""
        found = self._outlines.pop(moment, None)
        for past in [m for m in self._outlines if m < moment]:
            self._outlines.pop(past).close()
        self._announced -= {m for m in self._announced if m < moment}
        return found

    def clear(self) -> None:
        """Forgets all."""
        self._announced.clear()
        while self._outlines:
            self._outlines.popitem()[1].close()
