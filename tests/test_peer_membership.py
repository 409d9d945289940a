"""Decisions of the coordinator of peers, from what they say of themselves."""

from collections import Counter
from dataclasses import replace

from muster.launch.peers.channel import Message
from muster.launch.peers.membership import (
    MAX_LINK_FAILURES,
    MAX_PEER_FAILURES,
    Membership,
    PeerState,
    choose_ring,
)
from muster.launch.peers.settings import Settings

SETTINGS = Settings(beat_s=1, silence_s=10, reconnect_s=2, straggler_s=60)
IN = PeerState("arrived", 4, "h4", members=("a", "b", "c"))
NOW = 100.0


def group(settings: Settings = SETTINGS, **states: PeerState) -> Membership:
    """A coordinator that has been there for long."""
    found = Membership(settings, NOW - 1000)
    for name, state in states.items():
        found.update(name, state, NOW)
    return found


def doings(orders: dict[str, Message]) -> dict[str, str]:
    return {name: order["do"] for name, order in orders.items()}


def test_the_last_to_arrive_ends_a_round_and_joiners_have_no_weight() -> None:
    members = group(a=IN, b=replace(IN, phase="training"), c=replace(IN, phase="idle"))
    assert members.decide(NOW) == {}
    members.update("b", IN, NOW)
    orders = members.decide(NOW)
    assert doings(orders) == dict.fromkeys("abc", "exchange")
    assert orders["a"] == orders["b"]
    assert orders["a"]["weights"] == {"a": 1, "b": 1, "c": 0}
    assert orders["a"]["trained"] == 3
    assert members.decide(NOW) == orders
    for name in "abc":
        members.update(name, replace(IN, phase="exchanging", generation=orders["a"]["generation"]), NOW)
    assert members.decide(NOW) == {}


def test_late_peers_are_left_behind_and_take_over_the_state() -> None:
    members = group(a=IN, b=replace(IN, phase="training"))
    assert members.decide(NOW) == {}
    assert members.decide(NOW + 59) == {}
    assert [*members.decide(NOW + 61)] == ["a"]
    members.update("a", replace(IN, phase="training", round=5, digest="h5", committed=1), NOW + 62)
    assert members.decide(NOW + 62) == {}
    members.update("b", IN, NOW + 63)
    assert members.decide(NOW + 63) == {"b": {"do": "fetch", "round": 5, "digest": "h5", "source": "a"}}


def test_no_round_begins_or_ends_without_as_many_peers_as_there_must_be() -> None:
    members = group(replace(SETTINGS, min_peers=2), a=replace(IN, phase="idle"))
    assert members.decide(NOW) == {"a": {"do": "wait", "present": 1, "needed": 2}}
    members.update("b", replace(IN, phase="idle"), NOW)
    assert doings(members.decide(NOW)) == dict.fromkeys("ab", "begin")


def test_the_state_that_most_peers_have_counts() -> None:
    orders = group(a=IN, b=replace(IN, digest="other"), c=IN).decide(NOW)
    assert orders.pop("b")["do"] == "fetch"
    assert orders["a"]["ring"] == ("a", "c")


def prepared(generation: int = 7, result: str = "mean") -> PeerState:
    return replace(IN, phase="prepared", generation=generation, result=result, ring=("a", "b", "c"))


def test_a_result_is_applied_once_all_that_are_left_have_it() -> None:
    members = group(a=prepared(), b=prepared(), c=replace(prepared(), phase="exchanging"))
    assert members.decide(NOW) == {}
    members.lose("c", NOW, has_left=False)
    assert doings(members.decide(NOW)) == dict.fromkeys("ab", "commit")


def test_an_exchange_with_a_failed_or_another_result_is_aborted() -> None:
    for last in (replace(IN, failed=7), prepared(result="another")):
        members = group(a=prepared(), b=prepared(), c=last)
        orders = members.decide(NOW)
        assert {doings(orders)[name] for name in "ab"} == {"abort"}


def test_a_restarted_coordinator_ends_an_exchange_as_the_one_before_would_have() -> None:
    applied = replace(IN, phase="training", round=5, digest="h5", committed=7)
    members = group(a=applied, b=prepared())  # c is gone, and was told nothing
    assert doings(members.decide(NOW)) == {"b": "commit"}
    members = group(a=prepared(), b=prepared(), c=prepared())
    assert doings(members.decide(NOW)) == dict.fromkeys("abc", "commit")


def test_a_restarted_coordinator_waits_for_those_that_were_there() -> None:
    members = Membership(SETTINGS, NOW)
    members.update("a", IN, NOW)
    assert members.decide(NOW + 5) == {}
    assert doings(members.decide(NOW + 11)) == {"a": "exchange"}
    members = Membership(SETTINGS, NOW)
    for name in "abc":
        assert members.decide(NOW) == {}
        members.update(name, IN, NOW)
    assert doings(members.decide(NOW)) == dict.fromkeys("abc", "exchange")
    members = Membership(SETTINGS, NOW)
    members.update("a", PeerState("idle", 0, ""), NOW)  # others may come that it hasn't met
    assert members.decide(NOW + 1) == {}
    assert doings(members.decide(NOW + 3)) == {"a": "begin"}


def test_peers_do_not_go_on_from_an_earlier_state_while_those_with_the_last_one_may_come_back() -> None:
    last = replace(IN, round=6, digest="h6", phase="training", members=("b",))
    members = group(a=IN, b=last)
    members.lose("b", NOW, has_left=False)
    assert members.decide(NOW + 5) == {}
    members.update("b", last, NOW + 6)
    assert doings(members.decide(NOW + 6)) == {"a": "fetch"}
    members.lose("b", NOW + 6, has_left=False)
    assert doings(members.decide(NOW + 17)) == {"a": "exchange"}
    assert any("rounds 5 to 6 are lost" in sentence for sentence in members.events)


def test_no_round_is_lost_where_all_have_left() -> None:
    members = group(a=IN)
    members.lose("a", NOW, has_left=True)
    assert members.decide(NOW + 1000) == {}
    assert members.events == []


def test_a_peer_that_is_still_in_an_aborted_exchange_is_called_to_the_next() -> None:
    members = group(a=IN, b=IN, c=IN)
    first = members.decide(NOW)["a"]["generation"]
    members.update("a", replace(IN, failed=first, suspect="b"), NOW)
    assert members.decide(NOW) == {}
    assert any("was aborted" in sentence for sentence in members.events)
    second = members.decide(NOW + 5)["a"]["generation"]
    assert second > first
    members.update("b", replace(IN, phase="exchanging", generation=first, ring=("a", "b", "c")), NOW + 5)
    orders = members.decide(NOW + 5)
    assert orders.pop("b") == {"do": "abort", "generation": first}
    members.update("b", replace(IN, failed=first), NOW + 5)
    assert members.decide(NOW + 5)["b"] == orders["a"]
    assert orders["a"]["generation"] == second


def test_a_link_fails_once_in_an_exchange_whoever_says_so() -> None:
    members = group(a=IN, b=IN, c=IN)
    for now_s in (NOW, NOW + 10):
        generation = members.decide(now_s)["a"]["generation"]
        for name, suspect in (("a", "b"), ("b", "a"), ("c", "a"), ("c", "b")):
            members.update(name, replace(IN, failed=generation, suspect=suspect), now_s)
        assert members.decide(now_s) == {}
        assert members.bad_links.keys() == {frozenset("ab")}
    orders = members.decide(NOW + 20)
    assert {*orders["a"]["ring"]} == {*"ac"}
    assert orders["b"] == {"do": "leave_out", "round": IN.round}


def test_a_restarted_coordinator_aborts_an_exchange_that_not_all_have_begun() -> None:
    begun = replace(IN, phase="exchanging", generation=7, ring=("a", "b", "c"))
    orders = group(a=begun, b=begun, c=IN).decide(NOW)
    assert doings(orders) == dict.fromkeys("ab", "abort")


def test_generations_of_a_restarted_coordinator_are_new() -> None:
    members = group(a=replace(IN, failed=41), b=IN, c=IN)
    assert members.decide(NOW)["a"]["generation"] > 41


def test_rings_avoid_links_that_have_failed_and_leave_out_an_end_where_they_can_not() -> None:
    bad = Counter({frozenset("ab"): MAX_LINK_FAILURES})
    ring = choose_ring("abcd", bad, 1)
    assert {*ring} == {*"abcd"}
    assert {*"ab"} not in [{one, other} for one, other in zip(ring, [*ring[1:], ring[0]], strict=True)]
    assert {*choose_ring("abc", bad, 1)} == {*"ac"}
    assert choose_ring("ab", bad, 1) == ("a",)
    assert {*choose_ring("ab", bad, 2)} == {*"ab"}


def test_a_peer_that_no_other_reaches_is_left_out_after_three_failures() -> None:
    names, bad, failed = "abcde", Counter[frozenset[str]](), 0
    while "a" in (ring := choose_ring(names, bad, 1)):
        bad[frozenset(("a", ring[ring.index("a") - 1]))] += 1
        failed += 1
    assert failed == MAX_PEER_FAILURES
    assert {*ring} == {*"bcde"}
    bad[frozenset("ab")] = MAX_LINK_FAILURES
    assert {*choose_ring("abc", bad + Counter({frozenset("ac"): 1}), 1)} == {*"bc"}
