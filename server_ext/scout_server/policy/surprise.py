"""How well what comes next can be told: log losses as they come, over those of a uniform guess."""

__all__ = ["Surprise"]

_EVEN = 1 / 16  # how fast the average that surprises do not move more than others follows
_FAST, _SLOW = 0.25, 0.06  # how fast predictability falls, and how fast it rises


def _within_one(share: float) -> float:
    return 0.0 if share < 0.0 else 1.0 if share > 1.0 else share


class Surprise:
    """Answers: how predictable is it now, and how predictable over some time?"""

    __slots__ = ("even_loss", "loss")

    def __init__(self, loss: float = 1.0) -> None:
        self.loss = loss
        """Moving average of the relative loss, in which a surprise weighs more."""
        self.even_loss = loss
        """The same, without weighing surprises more, of what was known."""

    def learn(self, relative: float, *, new: bool) -> None:
        """Learn one log loss over that of a uniform guess; *new*: it was of something unseen."""
        if relative > 2.0:
            relative = 2.0
        self.loss += (_FAST if relative > self.loss else _SLOW) * (relative - self.loss)
        if not new:
            self.even_loss += _EVEN * (relative - self.even_loss)

    @property
    def predictability(self) -> float:
        """R in [0, 1]; a surprise lowers it at once."""
        return _within_one(1.0 - self.loss)

    @property
    def regular(self) -> float:
        """R over some time, in [0, 1]."""
        return _within_one(1.0 - self.even_loss)
