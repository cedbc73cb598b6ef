"""The two vocabularies that every measurement is told in."""

from __future__ import annotations

from enum import StrEnum

__all__ = ["Phase", "Tag"]


class Phase(StrEnum):
    """What a training step is doing. Phases may nest: reduction overlaps the backward pass, for one."""

    LOAD = "load"
    AUGMENT = "augment"
    FORWARD = "forward"
    BACKWARD = "backward"
    REDUCE = "reduce"
    UPDATE = "update"
    VALIDATE = "validate"
    CHECKPOINT = "checkpoint"


class Tag(StrEnum):
    """What a message or collective is for. A tag belongs to the call or its group, never to a thread:
    the backward pass runs in threads of its own.
    """

    GRADIENTS = "parameters and gradients"
    BATCH_NORM = "batch-norm statistics"
    LOSS = "loss"
    HALO = "halo exchange"
    PIPELINE = "pipeline activations"
    TILES_TO_BATCH = "tiles to batch"
    CHECKPOINT = "checkpoint"
    DATA = "data"
    CONTROL = "control"
    OTHER = "other"
    """of a script that does not say"""
