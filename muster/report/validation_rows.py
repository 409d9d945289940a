"""The tables of a validation, as cells: the same for the terminal, the page and the documentation."""

from muster.report.numbers import NOTHING, format_seconds
from muster.spec.plan import Plan
from muster.spec.plan_name import format_plan_name
from muster.validate.score import Errors
from muster.validate.summary import Group, Summary, titles, unread

Cells = tuple[str, ...]
_PLACES = 4
"""So many places of rows that share a reason are named."""


def percent(value: float | None, sign: bool = False) -> str:
    """`7.3 %`, with a sign `−1.2 %`."""
    if value is None:
        return NOTHING
    return f"{value:{'+' if sign else ''}.1f} %".replace("-", "−")


def error_rows(summary: Summary) -> list[Cells]:
    """A header, one row for each source, and one for all."""
    head = (
        *("source", "rows", "predicted", "error", "median", "bias"),
        *("specified", "error", "median", "bias", "open", "width", "inside", "Calculon", "Muster there"),
    )
    names = titles(summary)
    rows = [_error_row(names[name], group) for name, group in summary.by_source.items() if group.every.rows]
    return [head, *rows, _error_row("all", summary.overall)]


def _error_row(name: str, group: Group) -> Cells:
    return (
        *(name, str(group.every.rows), str(group.every.predicted), *_errors(group.every)),
        *(str(group.specified.predicted), *_errors(group.specified)),
        *(str(group.interval.rows), percent(group.interval.width), percent(group.interval.coverage)),
        *(percent(group.calculon.mape), percent(group.beside_calculon.mape)),
    )


def _errors(errors: Errors) -> Cells:
    return percent(errors.mape), percent(errors.median_ape), percent(errors.bias, sign=True)


def outcome_rows(summary: Summary) -> list[Cells]:
    """A header, one row for each source with a failed run, and one for all."""
    head = ("source", "failed, said so", "failed, said fits", "worked, said fits", "worked, said fails")
    head += ("balanced accuracy", "near the capacity", "undecided")
    names = titles(summary)
    groups = {names[name]: group for name, group in summary.by_source.items()} | {"all": summary.overall}
    rows = []
    for name, group in groups.items():
        found = group.outcome
        counts = (found.oom_predicted_oom, found.oom_predicted_fit)
        counts += (found.success_predicted_fit, found.success_predicted_oom)
        if sum(counts) + len(found.near) + found.undecided:
            share = percent(found.balanced_accuracy)
            rows.append((name, *map(str, counts), share, str(len(found.near)), str(found.undecided)))
    return [head, *rows] if rows else [head]


def sweep_rows(summary: Summary) -> list[Cells]:
    """A header and one row for each sweep."""
    head = ("sweep", "layouts", "out of memory", "rank correlation", "first reaches", "best in first three")
    return [
        head,
        *(
            (
                *(sweep.name, str(sweep.layouts), str(sweep.failed), f"{sweep.rank_correlation:.2f}"),
                *(percent(100 * sweep.first_reaches), "yes" if sweep.best_in_first_three else "no"),
            )
            for sweep in summary.sweeps
        ),
    ]


def worst_rows(summary: Summary) -> list[Cells]:
    """A header and one row for each of the rows that are furthest off."""
    rows: list[Cells] = [("row", "model", "devices", "plan", "measured", "predicted", "error", "open")]
    for result in summary.worst:
        assert result.setting is not None
        row = result.row
        plan = result.setting.cases[result.chosen].plan
        rows.append(
            (
                *(row.place, row.model_name, f"{row.n_gpus} × {row.gpu}", plan_words(plan)),
                *(format_seconds(result.measured_s), format_seconds(result.predicted_s)),
                *(percent(100 * result.error, sign=True), ", ".join(result.setting.unstated) or "nothing"),
            )
        )
    return rows


def plan_words(plan: Plan) -> str:
    """A plan's short name without the hash that stands for what a name can't say."""
    return format_plan_name(plan).partition("+")[0]


def unread_rows(summary: Summary) -> list[Cells]:
    """A header and one row for each reason."""
    rows: list[Cells] = [("reason", "rows", "which")]
    for reason, places in unread(summary.unpredicted).items():
        more = f", … {len(places) - _PLACES} more" if len(places) > _PLACES else ""
        rows.append((reason, str(len(places)), ", ".join(places[:_PLACES]) + more))
    return rows
