r"""What helpers can gain at most, out of rates that were measured; no clock, no process.

    f   samples/s of training alone            h   samples/s that helpers make
    a   s per sample of augmentation on the trainer's core
    n   samples/s without helpers: 1 / (1/f + a)

The trainer takes what helpers make and makes the rest itself. In a second it trains R samples, h of them made
elsewhere, if it can take so many:

    R / f + (R - h) a = 1    ──►   R = (1 + h a) / (1 / f + a)      never more than f

A trainer that makes nothing itself is held up by the slower one: R = min(f, h).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Rates", "at_most", "with_validation"]


@dataclass(frozen=True)
class Rates:
    """Samples per second, of one round."""

    none: float
    """trained where the loader is in the trainer"""
    train: float
    """trained with batches that lie ready"""
    augment: float
    """made by the helper"""
    own_s: float
    """of augmentation per sample on the trainer's core"""

    @property
    def steals(self) -> float:
        """Samples per second if the trainer makes what the helper does not."""
        return min(self.train, (1.0 + self.augment * self.own_s) / (1.0 / self.train + self.own_s))

    @property
    def waits(self) -> float:
        """Samples per second if it makes nothing itself."""
        return min(self.train, self.augment)


def at_most(rates: Sequence[Rates]) -> list[float]:
    """Of each round: times the speed without helpers that is possible.

    >>> at_most([Rates(50.0, 100.0, 200.0, 0.01), Rates(50.0, 100.0, 40.0, 0.01)])
    [2.0, 1.4]
    """
    return [round(one.steals / one.none, 12) for one in rates]


def with_validation(
    train_s: float,
    evaluate_s: float,
    augment_s: float = 0.0,
    *,
    evaluated_s: float | None = None,
    made_s: float = 0.0,
) -> float:
    """Times the speed of an epoch without helpers, if one helper evaluates, and augments in the time left.

    All in seconds per epoch: of training, evaluation and augmentation on the trainer; `evaluated_s` and
    `made_s` are what the helper takes for all of the evaluation (None: as long) and for all batches (0: it
    makes none). Evaluation comes first: none may be skipped. What the helper does not make, the trainer does.

    >>> with_validation(8.0, 2.0)
    1.25

    The helper evaluates for 2 s, and makes all batches in 4 of the other 6:

    >>> with_validation(8.0, 2.0, 4.0, made_s=4.0)
    1.75
    """
    evaluated_s = evaluate_s if evaluated_s is None else evaluated_s
    alone_s = train_s + augment_s
    epoch_s = alone_s
    if made_s:
        # An epoch of e seconds: the helper makes (e - evaluated) / made of the batches, the trainer the rest.
        speed = augment_s / made_s
        epoch_s = max(train_s, min((alone_s + evaluated_s * speed) / (1.0 + speed), alone_s))
    return (alone_s + evaluate_s) / max(epoch_s, evaluated_s)
