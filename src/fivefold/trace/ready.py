"""How far workers of a loader are ahead of the step that takes their batches."""

from __future__ import annotations

from typing import Any

__all__ = ["ready_batches"]


def ready_batches(iterator: Any) -> int | None:
    """Batches that workers of torch's DataLoader have made and nobody has taken; None where it has none.

    `iterator` is what iterating over it gave.
    """
    tasks, queue = getattr(iterator, "_task_info", None), getattr(iterator, "_data_queue", None)
    if tasks is None or queue is None:
        return None
    try:
        waiting = int(queue.qsize())
    except NotImplementedError:  # macOS cannot count
        return None
    return waiting + sum(len(task) > 1 for task in tasks.values())
