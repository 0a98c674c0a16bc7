"""Durations seen so far, some of them cut short."""

from collections import deque

__all__ = ["DurationHistory"]


class DurationHistory:
    """
    The latest durations of one kind, in seconds, with their Kaplan-Meier median.

    A censored duration says: it lasted at least this long. The median minimises the expected
    absolute error and ignores how long the tail is.
    """

    __slots__ = ("_beaten", "_median", "_samples", "_stale")

    def __init__(self, samples: int) -> None:
        self._samples: deque[tuple[float, bool]] = deque(maxlen=samples)
        self._median: float | None = None
        self._stale = False
        self._beaten: deque[bool] = deque(maxlen=samples)

    def __len__(self) -> int:
        """Return the number of durations kept."""
        return len(self._samples)

    def add(self, duration_s: float, *, censored: bool) -> None:
        """Add one duration; the oldest is forgotten when there is no room."""
        self._samples.append((duration_s, censored))
        self._stale = True

    def note_deadline(self, *, beaten: bool) -> None:
        """Note whether a call with a deadline ended clearly before it."""
        self._beaten.append(beaten)

    @property
    def beats_deadlines(self) -> bool:
        """Whether most calls (of at least four) ended clearly before their deadline."""
        return len(self._beaten) >= 4 and 2 * sum(self._beaten) > len(self._beaten)

    def median_s(self) -> float | None:
        """
        Return the time by which half of the calls have ended; None without any completed call.

        When too many are censored for that, the longest completed duration is returned.
        """
        if self._stale:
            self._median = self._compute()
            self._stale = False
        return self._median

    def _compute(self) -> float | None:
        # At equal times an end comes before a cut: the cut call was still at risk.
        ordered = sorted(self._samples)
        at_risk = len(ordered)
        alive = 1.0
        median: float | None = None
        for duration, censored in ordered:
            if not censored:
                alive *= (at_risk - 1) / at_risk
                median = duration
                if alive <= 0.5 + 1e-12:
                    break
            at_risk -= 1
        return median
