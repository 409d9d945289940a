"""Rules about plans as data: predicate, sentence, repair. Legality, runtime support and nearest plans share them."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from muster.spec.layer_strategy import LayerStrategy
from muster.spec.plan import Plan


@dataclass(frozen=True, slots=True)
class Rule:
    """One thing that no plan may have, whatever the model and the batch."""

    broken: Callable[[Plan], bool | None]
    """The predicate: true for plans that break the rule."""
    sentence: str | Callable[[Plan], str]
    """The reason for people, or a function that makes it of the plan."""
    repair: Callable[[Plan], Plan]
    """Gives a plan that keeps the rule and differs in as little as can be."""

    def reason(self, plan: Plan) -> str:
        """Return the sentence about a plan that breaks the rule."""
        return self.sentence if isinstance(self.sentence, str) else self.sentence(plan)


def broken_rules(rules: Iterable[Rule], plan: Plan) -> list[str]:
    """Return the sentence of each rule that a plan breaks, in the rules' order."""
    return [rule.reason(plan) for rule in rules if rule.broken(plan)]


def repaired(rules: Iterable[Rule], plan: Plan) -> Plan:
    """Return the plan with the repair of every rule that it breaks, applied one after another."""
    for rule in rules:
        if rule.broken(plan):
            plan = rule.repair(plan)
    return plan


def setting(**fields: object) -> Callable[[Plan], Plan]:
    """Return the repair that gives these fields of a plan these values."""
    return lambda plan: plan.model_copy(update=fields)


def in_every_layer(change: Callable[[LayerStrategy], LayerStrategy]) -> Callable[[Plan], Plan]:
    """Return the repair that changes the default strategy and that of every override."""

    def repair(plan: Plan) -> Plan:
        overrides = tuple(run.model_copy(update={"strategy": change(run.strategy)}) for run in plan.overrides)
        return plan.model_copy(update={"default_strategy": change(plan.default_strategy), "overrides": overrides})

    return repair


def as_by_default(*fields: str) -> Callable[[Plan], Plan]:
    """Return the repair that gives these fields of every layer's strategy the default strategy's values."""

    def repair(plan: Plan) -> Plan:
        values = {name: getattr(plan.default_strategy, name) for name in fields}
        return in_every_layer(lambda strategy: strategy.model_copy(update=values))(plan)

    return repair
