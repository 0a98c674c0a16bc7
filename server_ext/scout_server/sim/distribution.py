"""Quantiles of a stream in bounded memory."""

import math
from dataclasses import dataclass

__all__ = ["Distribution", "Summary"]

_GROWTH = 1.01
_LOG_GROWTH = math.log(_GROWTH)
_FLOOR = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What is reported of one quantity; quantiles are within half a percent."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    least: float
    most: float


class Distribution:
    """
    Counts values in buckets that grow by 1 %: mean, least and most are exact.

    Values are not negative; those below a microsecond share one bucket.
    """

    __slots__ = ("_buckets", "count", "least", "most", "total")

    def __init__(self) -> None:
        self._buckets: dict[int, int] = {}
        self.count = 0
        self.total = 0.0
        self.least = math.inf
        self.most = 0.0

    def add(self, value: float) -> None:
        """Count *value*."""
        bucket = int(math.log(value / _FLOOR) / _LOG_GROWTH) if value > _FLOOR else -1
        buckets = self._buckets
        buckets[bucket] = buckets.get(bucket, 0) + 1
        self.count += 1
        self.total += value
        if value < self.least:
            self.least = value
        if value > self.most:
            self.most = value

    @property
    def mean(self) -> float:
        """Return the exact mean; 0 when there is nothing."""
        return self.total / self.count if self.count else 0.0

    def quantile(self, share: float) -> float:
        """Return the value below which *share* of the values lie; 0 when there is nothing."""
        if not self.count:
            return 0.0
        wanted = share * (self.count - 1)
        seen = 0
        for bucket in sorted(self._buckets):
            seen += self._buckets[bucket]
            if seen > wanted:
                if bucket < 0:
                    return self.least
                middle = _FLOOR * math.exp((bucket + 0.5) * _LOG_GROWTH)
                return min(max(middle, self.least), self.most)
        return self.most

    def points(self, n: int = 60) -> list[tuple[float, float]]:
        """Return (value, share of values up to it) at *n* shares, for a plot."""
        return [(self.quantile(i / (n - 1)), i / (n - 1)) for i in range(n)] if self.count else []

    def summary(self) -> Summary:
        """Return what is reported."""
        return Summary(
            count=self.count,
            mean=self.mean,
            p50=self.quantile(0.5),
            p90=self.quantile(0.9),
            p99=self.quantile(0.99),
            least=self.least if self.count else 0.0,
            most=self.most,
        )
