"""Sequences of unequal lengths: dynamic groups of ranks (`cpdyn`) against the best group size for all, simulated.

For each distribution of lengths some steps are drawn, assigned and timed with the costs that `muster predict` has for
the plan's groups. The lower bound is the work of all sequences at the degree where each costs least, spread evenly over
the ranks. A fixed plan must hold the longest sequence of the run, and its sequences are packed and balanced in the same
way.
"""

import argparse
from dataclasses import replace
from time import perf_counter
from typing import NamedTuple

import numpy as np

from muster.api.inputs import resolve_cluster, resolve_model
from muster.planner.sequence_groups.assignment import check_assignment, lower_bound_s, makespan_s
from muster.planner.sequence_groups.sequence_costs import SequenceCosts, predicted_costs
from muster.planner.sequence_groups.solve import assign_sequences
from muster.spec.cluster import ClusterSpec
from muster.spec.plan_name import parse_plan_name

K = 1024


class Distribution(NamedTuple):
    """Documents by length: (from, to, weight), lengths spread evenly over their logarithm."""

    source: str
    parts: tuple[tuple[int, int, float], ...]

    def draw(self, tokens: int, longest: int, seed: int) -> list[int]:
        """Return the lengths of documents of at most `longest`, of so many tokens together."""
        generator = np.random.default_rng(seed)
        weights = np.array([weight for *_, weight in self.parts])
        lengths: list[int] = []
        while sum(lengths) < tokens:
            low, high, _ = self.parts[generator.choice(len(self.parts), p=weights / weights.sum())]
            length = int(np.exp(generator.uniform(np.log(low), np.log(high))))
            lengths += [length] if length <= longest else []
        return lengths


def _by_tokens(parts: tuple[tuple[int, int, float], ...]) -> tuple[tuple[int, int, float], ...]:
    """Return documents for tokens: a part's mean length is that of lengths spread over their logarithm."""
    return tuple((low, high, tokens * np.log(high / low) / (high - low)) for low, high, tokens in parts)


DISTRIBUTIONS = {
    "pretraining": Distribution(
        "13.5 M documents of a training set, github:SandAI-org/MagiAttention"
        " exps/dist_attn/benchmark/datasets/default/doc_length_distribution.csv (commit 2c64135)",
        (
            (1, 10, 30254),
            (11, 50, 391188),
            (51, 100, 699596),
            (101, 200, 1377757),
            (201, 500, 3794735),
            (501, 1024, 3316785),
            (1025, 2048, 2106566),
            (2049, 4096, 988525),
            (4097, 8192, 410002),
            (8193, 16384, 173574),
            (16385, 32768, 115007),
            (32769, 65536, 18428),
            (65537, 131072, 22513),
            (131073, 196608, 18284),
        ),
    ),
    "long documents": Distribution(
        "tokens by length of Olmo 3's Longmino pool, from its technical report as in github:marin-community/marin"
        " experiments/posttrain/long_context_datasets.py",
        _by_tokens(
            (
                (8 * K, 16 * K, 144e9),
                (16 * K, 32 * K, 118e9),
                (32 * K, 64 * K, 138.87e9),
                (64 * K, 128 * K, 96e9),
                (128 * K, 256 * K, 60.8e9),
                (256 * K, 512 * K, 35.1e9),
                (512 * K, 1024 * K, 21.5e9),
            )
        ),
    ),
    "Wikipedia": Distribution(
        "quantiles of 10,000 English articles, github:wewebber/text-coll-stats README.md (cl100k_base)",
        ((4, 46, 0.05), (46, 305, 0.45), (305, 2464, 0.45), (2464, 8191, 0.0444), (8191, 32552, 0.0056)),
    ),
    "e-mail": Distribution(
        "quantiles of 10,000 texts of edrm-enron-v2, github:wewebber/text-coll-stats README.md (cl100k_base)",
        ((8, 17, 0.05), (17, 230, 0.45), (230, 3418, 0.45), (3418, 8191, 0.0232), (8191, 2976015, 0.0268)),
    ),
    "mailing lists": Distribution(
        "quantiles of 10,000 texts of w3c-emails, github:wewebber/text-coll-stats README.md (cl100k_base)",
        ((63, 149, 0.05), (149, 468, 0.45), (468, 1893, 0.45), (1893, 8191, 0.0461), (8191, 100852, 0.0039)),
    ),
    "chat": Distribution(
        "LMSYS-Chat-1M after arXiv:2503.02356 §1: 99 % are shorter than 4K and the longest of a million has 300K;"
        " between these a Pareto tail (its exponent is ln 10⁴ / ln 75), below evenly over the logarithm from 64 on",
        (
            (64, 4 * K, 0.99),
            *(
                (low * K, 2 * low * K, 0.01 * ((low / 4) ** -2.13 - (low / 2) ** -2.13))
                for low in (4, 8, 16, 32, 64, 128)
            ),
        ),
    ),
}


class Result(NamedTuple):
    """Sums over some steps of one distribution."""

    dynamic_s: float
    bound_s: float
    fixed_s: dict[int, float]
    solver_s: float
    """Longest time of the solver for one step."""
    shortest_step_s: float
    micro_batches: float

    @property
    def over_bound(self) -> float:
        """Time over the lower bound."""
        return self.dynamic_s / self.bound_s

    @property
    def gain(self) -> float:
        """Time of the best fixed degree over that of dynamic groups."""
        return min(self.fixed_s.values()) / self.dynamic_s


def with_ports(cluster: ClusterSpec, ports: int) -> ClusterSpec:
    """Return a cluster whose nodes have so many network ports; 0: as many as they have."""
    (group,) = cluster.groups
    if not ports or group.nics is None:
        return cluster
    nics = group.nics.model_copy(update={"count": ports})
    return cluster.model_copy(update={"groups": (group.model_copy(update={"nics": nics}),)})


def with_degree(costs: SequenceCosts, degree: int) -> SequenceCosts:
    """Return the costs of groups of one size alone."""
    return replace(costs, degrees=(degree,), fixed_s=(costs.fixed_s[costs.degrees.index(degree)],))


def compare(
    name: str, costs: SequenceCosts, num_ranks: int, seq_len: int, tokens: int, steps: int, lockstep: bool, work: float
) -> Result:
    """Draw and assign some steps of so many tokens, with dynamic groups and with those of each possible size."""
    fixed = {d: 0.0 for d in costs.degrees if d * costs.capacity >= seq_len}
    times, bound_s, solver_s, micro_batches = [], 0.0, 0.0, 0
    for seed in range(steps):
        lengths = DISTRIBUTIONS[name].draw(tokens, seq_len, seed)
        begin_s = perf_counter()
        found = assign_sequences(lengths, costs, num_ranks, lockstep, work)
        solver_s = max(solver_s, perf_counter() - begin_s)
        check_assignment(found, lengths, costs)
        times.append(makespan_s(found, lengths, costs, lockstep))
        micro_batches += len(found.micro_batches)
        bound_s += lower_bound_s(lengths, costs, num_ranks)
        for degree in fixed:
            own = with_degree(costs, degree)
            fixed[degree] += makespan_s(assign_sequences(lengths, own, num_ranks, lockstep), lengths, own, lockstep)
    return Result(sum(times), bound_s, fixed, solver_s, min(times), micro_batches / steps)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plan", default="cp64u-mb2-z1")
    parser.add_argument("--cluster", default="64xa100")
    parser.add_argument("--ports", type=int, default=2, help="network ports of a node; 0: the cluster's own")
    parser.add_argument("--model", default="llama2-7b")
    parser.add_argument("--seq-len", type=int, default=192 * K)
    parser.add_argument("--tokens", type=int, default=4 << 20, help="of a step")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--solver-work", type=float, default=0.0, help="limit of the integer program, about seconds")
    args = parser.parse_args()
    plan = parse_plan_name(args.plan)
    cluster = with_ports(resolve_cluster(args.cluster), args.ports)
    costs = predicted_costs(resolve_model(args.model), plan, args.seq_len, cluster)
    lockstep = plan.default_strategy.zero != "z1"
    print("| lengths | sequences | micro-batches | cpdyn | bound | best fixed | gain | solver |")
    print("|---|---|---|---|---|---|---|---|")
    for name, distribution in DISTRIBUTIONS.items():
        one = compare(name, costs, plan.cp, args.seq_len, args.tokens, args.steps, lockstep, args.solver_work)
        count = len(distribution.draw(args.tokens, args.seq_len, 0))
        best = min(one.fixed_s, key=one.fixed_s.__getitem__)
        print(
            f"| {name} | {count:,} | {one.micro_batches:.1f} | {one.dynamic_s / args.steps:.3f} s"
            f" | × {one.over_bound:.3f} | cp{best}: {one.fixed_s[best] / args.steps:.3f} s | {one.gain:.2f}"
            f" | {one.solver_s:.2f} s |"
        )


if __name__ == "__main__":
    main()
