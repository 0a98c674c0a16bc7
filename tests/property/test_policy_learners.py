"""Learners against references too simple to be wrong."""

import itertools
import math
from collections import Counter, defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scout_server.policy.agents import AgentTable, common_prefix
from scout_server.policy.contexts import Contexts
from scout_server.policy.duel import Duel, ShadowCache
from scout_server.policy.gaps import EDGES, GapModel, HintTrust
from scout_server.policy.retention import RetentionOrder
from scout_server.policy.sizes import deep_size
from scout_server.policy.survival import combined, survival
from scout_server.policy.transitions import END, Transitions

SYMBOLS = 6
RUNS = st.lists(st.lists(st.integers(1, SYMBOLS), min_size=1, max_size=12), max_size=12)


def learn(learner, runs):
    for run in runs:
        earlier = before = now = END
        for symbol in run:
            learner.observe(before, now, symbol, earlier=earlier)
            earlier, before, now = before, now, symbol
        learner.observe(before, now, END, earlier=earlier)


@given(RUNS)
@settings(max_examples=60, deadline=None)
def test_rows_are_distributions_and_agree_with_single_probabilities(runs):
    """Every row sums to one and holds what `probability` says of each successor."""
    learner = Transitions(SYMBOLS)
    learn(learner, runs)
    for earlier, before, now in ((0, 0, 0), (0, 0, 1), (0, 1, 2), (1, 2, 3)):
        learner._rows.clear()
        row = learner.row(before, now, earlier=earlier)
        assert row.sum() == pytest.approx(1.0)
        for symbol, value in enumerate(row):
            assert learner.probability(before, now, symbol, earlier) == pytest.approx(value)
    assert learner.matrix()[:, :].min() >= 0.0


@given(RUNS)
@settings(max_examples=60, deadline=None)
def test_the_most_frequent_successor_is_the_most_probable(runs):
    """Order 1 ranks successors as plain counts do, wherever one count leads."""
    learner = Transitions(SYMBOLS)
    learn(learner, runs)
    counts = defaultdict(Counter)
    for run in runs:
        for now, then in zip(run, [*run[1:], END], strict=True):
            counts[now][then] += 1
    matrix = learner.matrix()
    for now, successors in counts.items():
        ranked = successors.most_common(2)
        if len(ranked) < 2 or ranked[0][1] >= ranked[1][1] + 3:
            assert int(matrix[now].argmax()) == ranked[0][0]


def test_a_learner_for_64_agents_stays_below_25_kilobytes():
    """However much was observed, the state of 64 agents takes less than 25,000 bytes."""
    learner = Transitions(64)
    for step in range(6_000):
        earlier, before, now, then = (1 + (step * k + step // 7) % 64 for k in (3, 5, 7, 11))
        learner.observe(before, now, then, earlier=earlier)
    assert deep_size(learner) < 25_000


def test_one_surprise_lowers_predictability_at_once():
    """After a long certain run a single unforeseen step lowers R; certainty raises it slowly."""
    learner = Transitions(8)
    for _ in range(60):
        learn(learner, [[1, 2, 3]])
    sure = learner.predictability
    assert sure > 0.8
    learner.observe(1, 2, 7, earlier=0)
    shaken = learner.predictability
    assert shaken < sure - 0.2
    learner.observe(0, 1, 2)
    assert shaken < learner.predictability < sure


def test_order_three_tells_what_order_one_cannot():
    """In a cycle that visits one agent from two sides, the longer context decides."""
    learner = Transitions(8)
    for _ in range(20):
        learn(learner, [[1, 2, 3, 2, 1, 2, 3, 2]])
    assert learner.top(1, 2, 1, earlier=2) == [3]
    assert learner.top(3, 2, 1, earlier=2) != [3]


def test_a_certain_edge_outweighs_what_was_never_seen():
    """Where nothing was learnt, the graph's certain successor is the most probable."""
    learner = Transitions(8)
    learn(learner, [[1, 2], [3, 4], [1, 2]])
    row = learner.row(0, 3, (1,))
    assert int(row[1:].argmax()) + 1 == 1


def test_forgetting_an_agent_leaves_nothing_of_it():
    """A forgotten symbol has no counts as context or successor."""
    learner = Transitions(8)
    learn(learner, [[1, 2, 3, 2, 1]] * 5)
    learner.forget(2)
    assert learner.seen(2) == 0.0
    unseen = learner.probability(0, 1, 7)
    assert learner.probability(0, 1, 2) == pytest.approx(unseen)


@given(RUNS)
@settings(max_examples=30, deadline=None)
def test_a_restored_learner_predicts_the_same(runs):
    """A snapshot holds everything that predictions depend on."""
    learner, copy = Transitions(SYMBOLS), Transitions(SYMBOLS)
    learn(learner, runs)
    copy.restore(learner.snapshot())
    for before, now in ((0, 1), (1, 2), (2, 3)):
        learner._rows.clear()
        assert copy.row(before, now).tolist() == pytest.approx(learner.row(before, now).tolist())
    with pytest.raises(ValueError, match="another size"):
        Transitions(SYMBOLS + 1).restore(learner.snapshot())


def naive_survival(counts, start, steps, decay):
    """Enumerate all paths, cut nothing."""
    reached = [defaultdict(float) for _ in range(steps)]

    def walk(agent, probability, step):
        if step == steps:
            return
        total = sum(counts.get(agent, {}).values())
        for successor, count in counts.get(agent, {}).items():
            p = probability * count / total
            reached[step][successor] += p
            walk(successor, p, step + 1)

    for agent, probability in start.items():
        walk(agent, probability, 0)
    result = {}
    for agent in {each for level in reached for each in level}:
        left = 1.0
        for step, level in enumerate(reached):
            left *= 1.0 - min(1.0, level[agent]) * decay**step
        result[agent] = 1.0 - left
    return result


GRAPH = st.dictionaries(
    st.integers(1, 4),
    st.dictionaries(st.integers(1, 4), st.integers(1, 5).map(float), min_size=1, max_size=4),
)


@given(GRAPH, st.integers(1, 4))
@settings(max_examples=100, deadline=None)
def test_survival_without_pruning_is_the_sum_over_all_paths(counts, start):
    """Breadth-first search gives what the enumeration of all paths gives."""
    found = survival(counts, {start: 1.0}, steps=3, decay=0.7, prune=0.0)
    expected = naive_survival(counts, {start: 1.0}, 3, 0.7)
    assert found == pytest.approx(expected)


@given(GRAPH, st.integers(1, 4))
@settings(max_examples=50, deadline=None)
def test_pruning_only_lowers_survival(counts, start):
    """Cutting improbable paths never raises a probability."""
    full = survival(counts, {start: 1.0}, prune=0.0)
    for agent, value in survival(counts, {start: 1.0}, prune=0.1).items():
        assert value <= full[agent] + 1e-9


def test_sessions_combine_as_independent_events():
    """Two sessions of 1/2 make 3/4; one that is half alive counts half."""
    rows = {"a": {1: 0.5}, "b": {1: 0.5}}
    assert combined(rows, {"a": 1.0, "b": 1.0}) == {1: pytest.approx(0.75)}
    assert combined(rows, {"a": 1.0, "b": 0.5}) == {1: pytest.approx(0.625)}


@given(st.lists(st.floats(0.0, 1e6), max_size=80), st.sampled_from(["x", "y", "never"]))
@settings(max_examples=60, deadline=None)
def test_gap_distributions_are_distributions(gaps, kind):
    """A distribution function starts at 0, ends at 1 and never falls."""
    model = GapModel()
    for place, gap in enumerate(gaps):
        model.observe("x" if place % 2 else "y", gap)
    cdf = model.cdf(kind)
    assert cdf[0] == 0.0
    assert cdf[-1] == pytest.approx(1.0)
    assert (np.diff(cdf) >= -1e-12).all()


def test_gap_classes_are_told_apart():
    """After many gaps each class has its own median, within its bins."""
    model = GapModel()
    for _ in range(200):
        model.observe("fast", 0.5)
        model.observe("slow", 300.0)
    for kind, median in (("fast", 0.5), ("slow", 300.0)):
        at = int(np.searchsorted(model.cdf(kind), 0.5))
        assert EDGES[at] == pytest.approx(median, rel=0.5)


def test_a_client_that_lies_is_soon_ignored_and_an_honest_one_believed():
    """The weight of hints follows their record; steady bias is corrected, chaos is not."""
    honest, chaotic = HintTrust(), HintTrust()
    own = 0.3  # density of the learnt gaps, spread over a factor of ten
    for turn in range(60):
        real = 5.0
        honest.learn(real * 1.3, real, own)
        chaotic.learn(real * 100.0 ** ((turn * 0.618) % 1.0 * 2.0 - 1.0), real, own)
    assert honest.weight > 0.9
    assert honest.bias == pytest.approx(-math.log(1.3), abs=0.1)
    assert chaotic.weight < 0.1


CHAINS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 6), st.integers(0, 4)), max_size=40)


@given(CHAINS, st.integers(5, 25))
@settings(max_examples=100, deadline=None)
def test_the_lru_shadow_counts_what_a_real_lru_pool_hits(requests, capacity):
    """Counting blocks per group gives the hits of a block-by-block LRU with the same requests."""
    shadow = ShadowCache(capacity, None)
    order: list[tuple[int, int]] = []
    sizes: dict[int, int] = {}
    for agent, session, growth in requests:
        own = 100 + 10 * agent + session
        parts = [(agent, 4), (own, sizes.get(own, 0))]
        final = [(agent, 4), (own, sizes.get(own, 0) + growth)]
        sizes[own] = final[1][1]
        if sum(blocks for _, blocks in final) > capacity:
            break
        blocks = [(group, i) for group, n in final for i in range(n)]
        hits = 0
        for block in [(group, i) for group, n in parts for i in range(n)]:
            if block not in order:
                break
            hits += 1
        assert shadow.step(parts, final) == hits
        order = [block for block in order if block not in blocks]
        order = order[max(0, len(order) + len(blocks) - capacity) :] + blocks[::-1]


@given(st.lists(st.integers(0, 3), max_size=20), st.lists(st.integers(0, 3), max_size=20))
def test_a_common_prefix_is_found_by_halving(one, two):
    """Halving over chained hashes finds what a step-by-step comparison finds."""
    chains = [[hash(tuple(each[: i + 1])) for i in range(len(each))] for each in (one, two)]
    expected = 0
    while expected < min(len(one), len(two)) and chains[0][expected] == chains[1][expected]:
        expected += 1
    assert common_prefix(*chains) == expected


def test_the_agent_table_is_bounded():
    """More agents than the limit push out the least recently used, whose number is used again."""
    forgotten = []
    groups = iter(range(1, 10_000))
    table = AgentTable(3, lambda: next(groups), forgotten.append)
    for name in "abcadefa":
        table.named(name, hinted=True)
    assert len(table) == 3
    assert len({agent.symbol for agent in table}) == 3
    assert all(1 <= agent.symbol <= 3 for agent in table)
    assert [agent.name for agent in forgotten] == ["b", "c", "a", "d"]


@given(RUNS, st.lists(st.tuples(*[st.integers(0, SYMBOLS)] * 3), min_size=1, max_size=12))
@settings(max_examples=60, deadline=None)
def test_many_rows_at_once_are_the_rows_one_by_one(runs, contexts):
    """`rows` says of every context, known or not, what `row` says of it."""
    learner = Transitions(SYMBOLS, contexts=5)
    learn(learner, runs)
    learner._rows.clear()
    one_by_one = [learner.row(before, now, earlier=earlier) for earlier, before, now in contexts]
    assert learner.rows(contexts) == pytest.approx(np.stack(one_by_one))


@given(RUNS)
@settings(max_examples=60, deadline=None)
def test_contexts_are_found_however_often_their_places_were_used_again(runs):
    """A table of five contexts finds exactly those that it holds."""
    table = Contexts(SYMBOLS, 5)
    where = {}
    for run in runs:
        for context in zip([1, *run], [2, *run], run, strict=False):
            slot, new = table.use(*context)
            assert new == (context not in where)
            where = {known: at for known, at in where.items() if at != slot}
            where[context] = slot
    for context in itertools.product(range(SYMBOLS + 2), range(SYMBOLS + 1), range(SYMBOLS + 1)):
        assert table.find(*context) == where.get(context, -1)
    every = np.array(list(itertools.product(range(3), range(4), range(4))))
    found = table.find_all(every[:, 0], every[:, 1], every[:, 2])
    assert found.tolist() == [table.find(*context) for context in every.tolist()]


def test_sessions_that_end_in_one_class_of_gap_do_not_make_others_look_ended():
    """Where nine in ten ends come after a turn's end, its odds are above, a tool's below usual."""
    gaps = GapModel()
    for _ in range(200):
        gaps.observe("tool", 2.0)
    for _ in range(20):
        gaps.observe("stop", 60.0)
        gaps.observe_end("stop")
    assert gaps.end_lift("stop") > 2.0
    assert gaps.end_lift("tool") < 0.5
    assert gaps.end_lift("never seen") == 1.0
    for _ in range(20):
        gaps.observe_end("stop", -1.0)
    assert gaps.end_lift("stop") == 1.0


def test_a_duel_on_a_sample_of_groups_gives_the_verdict_of_the_whole():
    """With 4,000 groups of which some return and most never do, one in several is watched."""
    duels = {}
    for name, watched in (("sampled", 512), ("whole", 1 << 30)):
        duel = duels[name] = Duel(
            8_000, {"use": lambda group: float(group % 10 == 0)}, watched=watched
        )
        for step in range(12_000):
            group = 10 * (step // 2 % 900) if step % 2 else 10 * step + 1
            duel.step([(group, 8)], [(group, 8)])
    assert duels["sampled"].sampled > duels["whole"].sampled == 1
    assert duels["sampled"].leader == duels["whole"].leader == "use"
    share = {name: duel.hits["use"] / 12_000 / 8 for name, duel in duels.items()}
    assert share["sampled"] == pytest.approx(share["whole"], abs=0.05)


@given(st.lists(st.dictionaries(st.integers(1, 6), st.integers(0, 3)), max_size=10))
@settings(max_examples=40, deadline=None)
def test_scores_set_together_give_the_order_of_scores_set_one_by_one(scores):
    """`set_scores` and a `set_score` for each leave the same order of eviction."""
    together, apart = RetentionOrder(12), RetentionOrder(12)
    for order in (together, apart):
        order.scout = True
        for block in range(12):
            order.append(block, 1 + block % 6)
    for each in scores:
        together.set_scores({group: float(score) for group, score in each.items()})
        for group, score in each.items():
            apart.set_score(group, float(score))
    assert list(together) == list(apart)


def test_a_shadow_evicts_by_scores_that_changed_after_they_were_told():
    """What a client says between two requests counts at once, not at the next renewal only."""
    scores = {1: 1.0, 2: 2.0, 3: 3.0}
    duel = Duel(8, {"use": lambda group: scores[group]})
    duel.step([(1, 4)], [(1, 4)])
    duel.step([(2, 4)], [(2, 4)])
    duel.rescored()
    duel.step([(3, 1)], [(3, 1)])  # takes a block of the first
    scores[1] = 9.0
    duel.changed([1, 4])
    duel.step([(3, 4)], [(3, 4)])
    before = duel.hits["use"]
    duel.step([(1, 3)], [(1, 3)])
    assert duel.hits["use"] - before == 3
