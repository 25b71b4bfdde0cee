"""The rows of a state store: the state of a run, and effects that forks must not repeat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from .._core.former_names import keep_former_names


class StateRow(NamedTuple):
    """The mutable part of a run's state.

    `mark` is the position in the run at which the checkpoint was saved, `t` the wall time of the last write.
    """

    status: str | None = None
    checkpoint: str | None = None
    mark: str | None = None
    t: float = 0.0


#: Values of `EffectRow.status`.
BEGUN: Final = "begun"  # a step has started, and its outcome is not recorded
HAPPENED: Final = "done"  # a step has completed: `result` is its result
APPROVED: Final = "approved"  # an approval was answered: `result` is the answer
TAKEN: Final = "taken"  # never stored: a run may repeat the effect of another run
MEMBER: Final = "member"  # no effect: the run belongs to the lineage, whose rows are kept while it has members
CHILD: Final = "child"  # no effect: the lineage of a child, of which this lineage is a member
CALLED: Final = "called"  # a child of this lineage has started the effect, in the lineage that `result` names


class EffectRow(NamedTuple):
    """A step or an approval of one run, which forks of the run must not repeat without notice.

    Runs that were forked from each other share an `origin`: the first run of that lineage. The lineage of a child run
    is kept while the lineage of its caller is, which is a member of it and has a row with the digest "child". The
    lineage of the caller also has a row for each effect of a child, with the status "called".
    """

    origin: str
    key: str  # name and key of the step or wait, after the name of the call if "called"; "" of members and children
    digest: str  # of its arguments, or of the details of an approval; "" for none
    run_id: str  # the run that did it
    status: str
    result: str | None = None
    t: float = 0.0
    arrival: int = 0  # the `arrival` of the run's row: after its deletion, another run may get its id


keep_former_names(EffectRow, n="arrival")


def rows_of_run(there: Sequence[EffectRow], row: EffectRow, others: Sequence[str] = ()) -> list[EffectRow]:
    """Return the rows of an effect that are of the same run as `row`.

    Args:
        there: The stored rows, also rows whose digests cannot be compared: these may be of other arguments.
        row: The row that the run writes.
        others: Further digests of the effect.
    """
    mine = [each for each in there if (each.run_id, each.arrival) == (row.run_id, row.arrival)]
    return [each for each in mine if each.digest == row.digest or each.digest in others]


def rows_of_other_runs(there: Sequence[EffectRow], row: EffectRow) -> list[EffectRow]:
    """Return the rows of an effect that other runs have."""
    return [each for each in there if (each.run_id, each.arrival) != (row.run_id, row.arrival)]
