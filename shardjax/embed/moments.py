"""The moments of training that a snapshot is wanted of."""

from collections.abc import Callable

from shardjax.embed.outline import Outline


class Moments:
    """Outlines of moments that have been announced, until somebody takes them.

    A moment is the number of the training plan after which it is. Methods are given the
    number of plans that have been made, and what makes an outline of now.
    """

    def __init__(self):
        self._announced: set[int] = set()
        self._every: tuple[int, int] | None = None  # all from a first one on
        self._outlines: dict[int, Outline] = {}
        self._past = -1  # the last moment that somebody has asked for

    def announce(
        self,
        moment: int,
        planned: int,
        make: Callable[[], Outline],
        every: int | None = None,
    ) -> int:
        """Asks for an outline of a moment, or of now if that is past; returns which.

        Args:
          moment: which.
          planned, make: see the class.
          every: of all further moments so far apart as well, and of no others.
        """
        moment = max(moment, planned)
        if every is None:
            self._announced.add(moment)
        else:
            self._every = moment, every
        self.reached(planned, make)
        return moment

    def is_end(self, moment: int) -> bool:
        """Whether a window has to end there."""
        if moment in self._announced:
            return True
        if self._every is None:
            return False
        first, every = self._every
        return moment >= first and (moment - first) % every == 0

    def reached(self, planned: int, make: Callable[[], Outline]) -> None:
        """Makes the outline of now, if it is wanted."""
        new = planned > self._past and planned not in self._outlines
        if new and self.is_end(planned):
            self._announced.discard(planned)
            self._outlines[planned] = make()

    def take(self, moment: int) -> Outline | None:
        """The outline of a moment, if there is one; earlier ones are of no use any more."""
        self._past = max(self._past, moment)
        found = self._outlines.pop(moment, None)
        for past in [m for m in self._outlines if m < moment]:
            self._outlines.pop(past).close()
        self._announced -= {m for m in self._announced if m <= moment}
        return found

    def clear(self) -> None:
        """Forgets all."""
        self._announced.clear()
        self._every = None
        while self._outlines:
            self._outlines.popitem()[1].close()
