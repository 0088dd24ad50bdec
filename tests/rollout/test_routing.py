"""Engine selection by the router."""

from __future__ import annotations

import threading

from openrlhf.observability.metrics import Mean
from openrlhf.rollout import routing
from openrlhf.rollout.routing import SLACK, Router


def test_router_balances_prompts_by_samples_in_flight() -> None:
    router = Router(range(3))
    assert [router.pick(prompt, 4) for prompt in range(6)] == [0, 1, 2, 0, 1, 2]
    router.done(1, 1, 4)
    assert router.pick(6, 4) == 1


def test_all_samples_of_a_prompt_go_to_one_engine() -> None:
    router = Router(range(2))
    assert {router.pick("prompt") for _ in range(100)} == {0}
    assert {router.pick("another") for _ in range(100)} == {1}


def test_later_turn_goes_to_the_engine_that_has_its_prefix() -> None:
    router = Router(range(2))
    assert [router.pick(episode) for episode in range(4)] == [0, 1, 0, 1]
    for episode in range(4):
        router.done(episode, episode % 2)
    assert router.pick("others", SLACK) == 0
    assert [router.pick(episode) for episode in range(4)] == [0, 1, 0, 1]


def test_key_moves_away_from_a_much_busier_engine_and_does_not_move_back() -> None:
    router = Router(range(2))
    router.done("turn", router.pick("turn"))
    assert router.pick("long", SLACK) == 0
    assert router.pick("turn") == 0  # the imbalance is just within the limit
    router.done("turn", 0)
    assert router.pick("long") == 0
    assert router.pick("turn") == 1
    router.done("long", 0, SLACK + 1)
    assert router.pick("turn") == 1


def test_key_stays_if_its_engine_is_at_most_one_and_a_half_times_as_busy() -> None:
    router = Router(range(2))
    router.done("turn", router.pick("turn"))
    assert (router.pick("a", 150), router.pick("b", 100)) == (0, 1)
    assert router.pick("turn") == 0
    router.done("turn", 0)
    assert router.pick("a") == 0
    assert router.pick("turn") == 1


def test_finished_samples_are_no_longer_in_flight() -> None:
    router = Router(range(2))
    for key in "abab":
        router.pick(key, 5)
    router.done("a", 0, 5)
    router.done("a", 0, 5)
    assert router.in_flight == {0: 0, 1: 10}


def test_router_forgets_the_oldest_key_beyond_the_limit(monkeypatch) -> None:
    monkeypatch.setattr(routing, "MOST_KEYS", 2)
    router = Router(range(2))
    homes = {key: router.pick(key) for key in "xyz"}
    for key, engine in homes.items():
        router.done(key, engine)
    router.in_flight = {0: 1, 1: 0}  # only key x was forgotten and goes to the idle engine
    assert (homes["x"], router.pick("x"), router.pick("z")) == (0, 1, 0)


def test_idle_share_counts_engines_without_samples_but_not_lost_engines(monkeypatch) -> None:
    now = [0.0]
    monkeypatch.setattr(routing.time, "monotonic", lambda: now[0])
    router = Router(range(2))
    assert router.pick("a", 3) == 0
    now[0] = 4.0
    router.done("a", 0, 3)
    now[0] = 10.0
    assert router.idle([0, 1]) == Mean(6.0 + 10.0, 20.0)
    assert router.pick("a", among=[1]) == 1  # the engine of key "a" was lost
    now[0] = 12.0
    assert router.idle([0, 1]) == Mean(2.0, 4.0)
    now[0] = 13.0
    # Engine 0 has left, and engine 2 has not been added yet.
    assert router.idle([1, 2]) == Mean(0.0, 1.0)


def test_sample_that_starts_while_the_idle_time_is_read_is_counted_once(monkeypatch) -> None:
    """The idle time is read in the main thread, and samples start in the event loop's thread."""
    now = [0.0]
    router = Router([0])
    reader = threading.current_thread()
    picker = threading.Thread(target=router.pick, args=("a",))

    def monotonic() -> float:
        seen = now[0]
        if threading.current_thread() is reader and not picker.ident:
            now[0] = 5.0
            picker.start()
            picker.join(0.2)  # without mutual exclusion, the sample starts here
        return seen

    monkeypatch.setattr(routing.time, "monotonic", monotonic)
    router._changed[0] = router._read_at = 0.0
    now[0] = 4.0
    assert router.idle([0]) == Mean(4.0, 4.0)
    picker.join()
    now[0] = 6.0
    assert router.idle([0]) == Mean(1.0, 2.0)
