"""Choices by simulated steps: they fit, cost what they must, and are not made where nothing fits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fivefold.parallel.memory.decide import decided, least
from fivefold.parallel.memory.profile import Item, NodeBytes, Profile
from fivefold.parallel.memory.simulate import AGAIN, JOINED, KEEP, Link, Simulator, State

FAST, SLOW = Link(1e6, 1e6), Link(10.0, 10.0)
BLOCKS, SIZE = 20, 100


def profile(size: int = SIZE) -> Profile:
    """Blocks of convolution, norm and activation: two memories each, of which one is cheap to make again."""
    names = ("conv2d", "batch_norm", "relu") * BLOCKS
    items: list[Item] = []
    for node in range(0, 3 * BLOCKS, 3):
        items.append(Item(("value", node, 0), size, node, {node + 1}, {node + 1}))
        after = {node + 3} if node + 3 < len(names) else set[int]()
        items.append(Item(("value", node + 2, 0), size, node + 2, {node + 2, *after}, after))
    seconds = (0.02, 0.004, 0.002) * BLOCKS
    nodes = (NodeBytes(size, 2 * size, size),) * len(names)
    return Profile(names, tuple(items), seconds, tuple(2 * s for s in seconds), nodes)


def told(simulator: Simulator, state: State) -> tuple[float, int]:
    """Seconds and the most bytes of a step."""
    found = simulator.run([state])
    return float(found.seconds[0]), int(found.peak_bytes[0])


def of(simulator: Simulator, units: list[int], spilled: bool = False, window: int = 0) -> State:
    state = simulator.start()
    state.units[:], state.spilled[:], state.window_bytes = units, spilled, window
    return state


@pytest.mark.parametrize("link", [None, FAST, SLOW])
@pytest.mark.parametrize("part", [0.9, 0.6, 0.4, 0.3])
def test_what_is_decided_fits(part: float, link: Link | None) -> None:
    simulator = Simulator(profile(), link)
    free_s, free_bytes = told(simulator, simulator.start())
    limit = int(free_bytes * part)
    found = decided(simulator, limit)
    assert found is not None
    seconds, peak = told(simulator, found)
    assert peak <= limit and seconds >= free_s
    # At the worst everything is computed again once.
    assert seconds <= free_s * 4 / 3 + 1e-9


def test_nothing_is_given_up_that_fits() -> None:
    simulator = Simulator(profile(), FAST)
    found = decided(simulator, told(simulator, simulator.start())[1])
    assert found is not None and not found.units.any() and not found.spilled.any()


def test_what_is_cheap_is_computed_again_first() -> None:
    simulator = Simulator(profile(), None)
    free_s, free_bytes = told(simulator, simulator.start())
    found = decided(simulator, int(free_bytes * 0.6))
    assert found is not None
    assert set(found.units) == {KEEP, AGAIN}  # no convolution is computed twice
    assert told(simulator, found)[0] < free_s * 1.1


def test_a_fast_link_is_used_and_a_slow_one_is_not() -> None:
    fast, slow = Simulator(profile(), FAST), Simulator(profile(), SLOW)
    free_s, free_bytes = told(fast, fast.start())
    found = decided(fast, free_bytes // 2)
    assert found is not None and found.spilled.any()
    assert set(found.units) == {KEEP} and told(fast, found)[0] < free_s * 1.01
    found = decided(slow, free_bytes // 2)
    assert found is not None and not found.spilled.any()


@pytest.mark.parametrize("seed", range(12))
def test_with_a_link_nothing_takes_longer_than_without(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sizes = rng.integers(20, 400, 3 * BLOCKS)
    items = [replace(item, size_bytes=int(sizes[n])) for n, item in enumerate(profile().items)]
    shaken = replace(profile(), items=tuple(items))
    without = Simulator(shaken, None)
    rate = 10 ** rng.uniform(3.2, 4.5)
    beside = Simulator(shaken, Link(rate, rate, rng.uniform(0, 0.5) / rate))
    for part in (0.7, 0.5, 0.4):
        limit = int(told(without, without.start())[1] * part)
        alone, found = decided(without, limit), decided(beside, limit)
        if alone is not None:
            assert found is not None
            assert told(beside, found)[0] <= told(without, alone)[0] * (1 + 1e-9)


def test_what_a_span_takes_beside_its_nodes_counts_once_for_each() -> None:
    plain = Simulator(profile(), None)
    costly = Simulator(replace(profile(), span_s=0.5), None)
    alone = of(plain, [AGAIN] * plain.units)
    joined = of(plain, [*[JOINED] * (plain.units - 1), AGAIN])
    for state, spans in ((plain.start(), 0), (alone, plain.units), (joined, 1)):
        more = told(costly, state)[0] - told(plain, state)[0]
        assert more == pytest.approx(0.5 * spans)
        assert costly.again_s(state).sum() - plain.again_s(state).sum() == pytest.approx(
            0.5 * spans
        )


@pytest.mark.parametrize("room", [0, 3 * SIZE, 10 * SIZE])
def test_no_more_is_spilled_than_there_is_room_for(room: int) -> None:
    simulator = Simulator(profile(), replace(FAST, room_bytes=room))
    for part in (0.8, 0.5, 0.3, 0.2):
        found = decided(simulator, int(told(simulator, simulator.start())[1] * part))
        if found is not None:
            assert simulator.held(found)[1].sum() <= room
        for state in least(simulator)[:4]:
            assert simulator.held(state)[1].sum() <= room
    everything = of(simulator, [KEEP] * simulator.units, True)
    assert told(simulator, everything)[1] > 1 << 40, "it fits nowhere"


@pytest.mark.parametrize("window", [0, SIZE // 2, SIZE, 4 * SIZE])
def test_copies_that_do_not_hide_are_waited_for(window: int) -> None:
    simulator = Simulator(profile(), Link(1e3, 1e3))
    everything = of(simulator, [KEEP] * simulator.units, True, window)
    found = simulator.run([simulator.start(), everything])
    each_way_s = 2 * BLOCKS * SIZE / 1e3
    free_s, seconds = found.seconds
    assert seconds > 1.7 * each_way_s > free_s
    begun = found.out_s[1][~np.isnan(found.out_s[1])]
    assert len(begun) > BLOCKS / 2 and (np.diff(begun) >= 0).all()
    assert np.isnan(found.out_s[0]).all()


def test_a_larger_window_never_takes_longer_and_never_holds_less() -> None:
    simulator = Simulator(profile(), Link(8e3, 8e3))
    units = [KEEP] * simulator.units
    found = simulator.run([of(simulator, units, True, n * SIZE) for n in range(5)])
    assert (np.diff(found.seconds) <= 1e-12).all() and (np.diff(found.peak_bytes) >= 0).all()


def test_states_are_simulated_alike_alone_and_together() -> None:
    simulator, rng = Simulator(profile(), Link(5e3, 4e3, 1e-5)), np.random.default_rng(0)
    states: list[State] = []
    for _ in range(40):
        state = of(simulator, list(rng.integers(0, 3, simulator.units)), False, 3 * SIZE)
        state.spilled[:] = rng.random(len(simulator.items)) < rng.random()
        states.append(state)
    together = simulator.run(states)
    alone = [told(simulator, state) for state in states]
    assert together.seconds == pytest.approx([seconds for seconds, _ in alone])
    assert list(together.peak_bytes) == [peak for _, peak in alone]


def test_too_little_is_told_and_the_least_is_less_than_that() -> None:
    simulator = Simulator(profile(), None)
    assert decided(simulator, SIZE) is None
    found = [told(simulator, state)[1] for state in least(simulator)]
    assert SIZE < found[0] < told(simulator, simulator.start())[1] / 2 and found == sorted(found)


def test_whatever_fits_the_least_is_no_more() -> None:
    sizes = np.random.default_rng(0).integers(20, 400, 3 * BLOCKS)
    items = [replace(item, size_bytes=int(sizes[n])) for n, item in enumerate(profile().items)]
    simulator = Simulator(replace(profile(), items=tuple(items)), None)
    free = told(simulator, simulator.start())[1]
    found = [decided(simulator, int(free * part)) for part in np.arange(0.2, 1.0, 0.05)]
    fitting = [told(simulator, state)[1] for state in found if state is not None]
    assert len(fitting) < len(found), "a budget that is too little was wanted too"
    assert told(simulator, least(simulator)[0])[1] <= min(fitting)


def test_units_end_with_what_waits_for_the_processor() -> None:
    simulator = Simulator(profile(), None)
    assert all(
        stop == len(simulator.profile.names) or simulator.profile.heavy(stop - 1)
        for stop in simulator.bounds[1:]
    )
    state = of(simulator, [AGAIN] * simulator.units)
    last = simulator.profile.seconds[0]
    assert simulator.again_s(state)[1] == pytest.approx(0.006)
    state.units[1] = JOINED
    assert simulator.again_s(state)[1] == pytest.approx(0.006 + last)


def test_what_is_changed_in_place_stays_with_what_made_it() -> None:
    made = profile()
    (item,) = (item for item in made.items if item.made == 6)
    item.changed = 8
    assert not {7, 8} & set(Simulator(made, None).bounds)


def test_a_choice_names_all_nodes_once_and_keeps_spans_apart() -> None:
    simulator = Simulator(profile(), None)
    state = of(simulator, [(KEEP, AGAIN, AGAIN, JOINED)[n % 4] for n in range(simulator.units)])
    state.spilled[3] = True
    choice = simulator.choice(state)
    stops = [span.stop for span in choice.spans]
    assert [span.first for span in choice.spans] == [0, *stops[:-1]]
    assert stops[-1] == len(simulator.profile.names)
    assert choice.spilled == {simulator.items[3].key}
    assert sum(span.again for span in choice.spans) > 1
