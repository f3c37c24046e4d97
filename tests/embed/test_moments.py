"""Moments that are announced: outlines are made once, and none is kept for nothing."""

from shardjax.embed.moments import Moments


class Outline:
    closed = False

    def close(self):
        self.closed = True


def made():
    outlines = []

    def make():
        outlines.append(Outline())
        return outlines[-1]

    return outlines, make


def test_an_outline_is_made_when_planning_is_there():
    outlines, make = made()
    moments = Moments()
    assert moments.announce(5, 2, make) == 5
    assert moments.is_end(5) and not moments.is_end(4)
    moments.reached(4, make)
    assert not outlines
    moments.reached(5, make)
    moments.reached(5, make)
    assert len(outlines) == 1
    assert moments.take(4) is None
    assert moments.take(5) is outlines[0] and not outlines[0].closed
    assert moments.take(5) is None


def test_what_is_past_is_now():
    outlines, make = made()
    assert Moments().announce(3, 7, make) == 7
    assert len(outlines) == 1


def test_moments_far_apart():
    outlines, make = made()
    moments = Moments()
    moments.announce(4, 0, make, every=4)
    for planned in range(13):
        moments.reached(planned, make)
    assert len(outlines) == 3
    assert moments.take(8) is outlines[1]
    assert outlines[0].closed and not outlines[2].closed
    moments.clear()
    assert outlines[2].closed and not moments.is_end(16)


def test_a_moment_that_somebody_has_asked_for_is_not_made_again():
    outlines, make = made()
    moments = Moments()
    moments.announce(4, 0, make, every=4)
    assert moments.take(4) is None  # planning had not gone on: it was made otherwise
    moments.reached(4, make)
    assert not outlines
    moments.reached(8, make)
    assert len(outlines) == 1
