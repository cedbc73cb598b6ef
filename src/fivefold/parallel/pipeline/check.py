"""Whether a schedule can be run, and is right."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import pairwise

from fivefold.errors import PlanError
from fivefold.parallel.pipeline.schedule import Action, Op, Schedule, needs, walk

__all__ = ["check"]


def check(schedule: Schedule) -> None:
    """Raise `PlanError`, naming rank and action, unless all of this holds.

    - Every stage of every chain does F once for each of its micro-batches, then B once, or I and then W.
    - No rank waits for ever when each carries out its row in order.
    - Every stage does its F in the order of micro-batches: that is what batch norms record.
    - What one rank sends another, on one chain and in one direction, is awaited in the order it is sent.
    - Sums start behind the last gradient of their stage, and in the same order on all ranks that share them.
    """
    _check_shape(schedule)
    _check_places(schedule)
    _check_complete(schedule)
    for _ in walk(schedule):
        pass
    _check_forwards(schedule)
    _check_messages(schedule)
    _check_sums(schedule)


def _wrong(schedule: Schedule, what: str) -> PlanError:
    return PlanError(f"schedule {schedule.name!r}: {what}")


def _check_shape(schedule: Schedule) -> None:
    ranks, stages, chains = schedule.ranks, schedule.stages, schedule.chains
    if len(schedule.rows) != ranks:
        raise _wrong(schedule, f"{len(schedule.rows)} rows for {ranks} ranks; each rank needs one")
    if ranks < 1 or stages < 1 or stages % ranks:
        raise _wrong(schedule, f"{stages} stages cannot be shared evenly by {ranks} ranks")
    if chains not in (1, 2) or (chains == 2 and stages != ranks):
        raise _wrong(
            schedule,
            f"{chains} chains of {stages} stages on {ranks} ranks; "
            f"valid: one chain, or two with one stage per rank",
        )


def _check_places(schedule: Schedule) -> None:
    for rank, row in enumerate(schedule.rows):
        for action, times in Counter(row).items():
            chain, stage = action.chain, action.stage
            if chain not in range(schedule.chains) or stage not in range(schedule.stages):
                why = "but there is no such stage"
            elif (home := schedule.rank_of(chain, stage)) != rank:
                why = f"but rank {home} holds that stage"
            elif action.op is not Op.REDUCE and action.micro not in schedule.micros_of(chain):
                why = "but that micro-batch is not on its chain"
            elif times > 1:
                why = f"{times} times; once is enough"
            else:
                continue
            raise _wrong(schedule, f"rank {rank} does {action}, {why}")


def _check_complete(schedule: Schedule) -> None:
    for rank, row in enumerate(schedule.rows):
        seen = set(row)
        for chain, stage in schedule.held(rank):
            for micro in schedule.micros_of(chain):
                forward = Action(chain, stage, Op.FORWARD, micro)
                if forward not in seen:
                    raise _wrong(schedule, f"rank {rank} never does {forward}")
                backward = "".join(op for op in "BIW" if forward.same(Op(op), stage) in seen)
                if backward not in ("B", "IW"):
                    raise _wrong(
                        schedule,
                        f"rank {rank} follows {forward} by {backward or 'no backward'}; "
                        f"valid: B, or I and W",
                    )


def _check_forwards(schedule: Schedule) -> None:
    for rank, row in enumerate(schedule.rows):
        last: dict[tuple[int, int], Action] = {}
        for action in (a for a in row if a.op is Op.FORWARD):
            before = last.setdefault((action.chain, action.stage), action)
            if before.micro > action.micro:
                raise _wrong(
                    schedule,
                    f"rank {rank} does {action} behind {before}; the statistics of batch norms "
                    f"need the order of micro-batches",
                )
            last[action.chain, action.stage] = action


def _check_messages(schedule: Schedule) -> None:
    # Between neighbouring stages. All stages of a chain then have the same order of backwards, one after
    # the other, so what a skip connection carries from one stage to another is in order as well. Skip
    # connections of different stages may end on the same rank in any order: they have to be told apart.
    sent = {a.result: place for row in schedule.rows for place, a in enumerate(row)}
    awaited: defaultdict[tuple[int, int, int, Op], list[Action]] = defaultdict(list)
    for rank, row in enumerate(schedule.rows):
        for need in (need for action in row for need in needs(action, schedule.stages)):
            source = schedule.rank_of(need.chain, need.stage)
            if source != rank:
                awaited[source, rank, need.chain, need.op].append(need)
    for (source, rank, *_), messages in awaited.items():
        for one, two in pairwise(messages):
            if sent[one] > sent[two]:
                raise _wrong(
                    schedule,
                    f"rank {rank} awaits the result of {one} before that of {two}, but rank {source} "
                    f"sends them the other way round; messages are matched by their order",
                )


def _check_sums(schedule: Schedule) -> None:
    sums: list[list[int]] = []
    for rank, row in enumerate(schedule.rows):
        summed: dict[tuple[int, int], Action] = {}
        for action in row:
            held = (action.chain, action.stage)
            if held in summed:
                raise _wrong(schedule, f"rank {rank} does {action} behind {summed[held]}, the sum")
            if action.op is Op.REDUCE:
                summed[held] = action
        sums.append([stage for _, stage in summed])
    for rank, stages in enumerate(sums):
        for other in {
            other for stage in schedule.stages_of(rank) for other in schedule.ranks_of(stage)
        }:
            if sums[other] != stages:
                raise _wrong(
                    schedule,
                    f"rank {rank} sums the stages {stages}, rank {other}, which shares them, "
                    f"{sums[other]}; both have to start the same sums in the same order",
                )
