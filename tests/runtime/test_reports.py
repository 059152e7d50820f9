"""Reports: they name what differs, whatever the order of arrival, as a text and as a value.

golden/<name>.txt is the text for the program, the planted fault or the row of `DIVERGENCES` of that name.
"""

from __future__ import annotations

import inspect
import itertools
import json
import pickle
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import numpy as np
import pytest

from aiodist import (
    CallRecord,
    CollectiveError,
    CollectiveMismatchError,
    CollectiveReport,
    Divergence,
    DivergenceKind,
    Partition,
    Reason,
    ReplicaContext,
    ReplicaState,
)
from aiodist._checking.explore import run as run_under
from aiodist._checking.schedule import default_order
from aiodist._core.ledger import HISTORY
from tests.faults.case import CASES, Case
from tests.faults.test_faults import program_of
from tests.project.paths import ROOT
from tests.runtime import golden_programs as programs
from tests.runtime.divergences import DIVERGENCES, X, diverging, zeros
from tests.runtime.programs import Program, Relay, check_golden, error_of, mirrored, replica, run, turns

pytestmark = pytest.mark.anyio
GOLDEN = Path(__file__).parent / "golden"

PROGRAMS: list[Program] = [
    program
    for program in vars(programs).values()
    if inspect.iscoroutinefunction(program) and list(inspect.signature(program).parameters) == ["ctx"]
]
SIZES: dict[Program, int] = {  # others have 3 replicas
    programs.tie: 2,
    programs.outlier_among_many: 512,
    programs.all_different: 512,
    programs.many_left: 12,
}
PLANTED = [
    "source_is_its_own_id", "swapped_sums_of_equal_shape", "returns_when_its_own_loss_is_small", "one_loop_is_shorter",
    "stops_early_by_its_own_loss", "never_comes", "merge_that_never_returns", "another_kind_in_the_group",
    "scope_cancelled_by_a_sibling", "member_does_not_make_the_group", "groups_of_all_in_another_order",
    "timeout_around_one_collective",
]  # fmt: skip
TIMED = [programs.merge_hangs, programs.lock_across_a_collective]
IN_ONE_ORDER = [
    *TIMED,
    *SIZES,
    *(each for each in PROGRAMS if each.__name__.startswith(("abandoned", "held", "left"))),
]
each_of = partial(pytest.mark.parametrize, "program", ids=lambda program: program.__name__)


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@each_of(PROGRAMS)
async def test_report_has_its_golden_text_in_any_order_of_arrival(program: Program, update_golden: bool) -> None:
    async def delayed(ctx: ReplicaContext, order: Sequence[int]) -> Any:
        for _ in range(4 * order[replica()]):
            await anyio.lowlevel.checkpoint()
        return await program(ctx)

    error = await error_of(program, SIZES.get(program, 3), timeout=0.25 if program in TIMED else None)
    check_golden(GOLDEN / program.__name__, error, update_golden)
    if program not in IN_ONE_ORDER:
        texts = {str(await error_of(partial(delayed, order=order))) for order in ((1, 2, 0), (2, 1, 0), (0, 2, 1))}
        assert len(texts) == 1, "\n=====\n".join(texts)


@pytest.mark.parametrize("case", [case for case in CASES if case.name in PLANTED], ids=lambda case: case.name)
def test_report_of_a_planted_fault_has_its_golden_text(case: Case, update_golden: bool) -> None:
    error = run_under(program_of(case), default_order, seed=0, seconds=60).error
    assert isinstance(error, CollectiveError)
    check_golden(GOLDEN / case.name, error, update_golden)


def test_every_golden_text_is_used() -> None:
    used = {each.__name__ for each in PROGRAMS}.union(DIVERGENCES, PLANTED)
    assert {path.stem for path in GOLDEN.glob("*.txt")} == used


# What differs.


@pytest.mark.parametrize("name", DIVERGENCES)
async def test_divergence_has_its_golden_text_in_any_order_of_arrival(name: str, update_golden: bool) -> None:
    orders = itertools.permutations(range(3))
    errors = [await error_of(partial(diverging, name=name, odd=1, relay=Relay(order))) for order in orders]
    check_golden(GOLDEN / name, errors[0], update_golden)
    for error in errors:
        report = error.report
        assert type(error) is CollectiveMismatchError
        assert str(error) == str(report) == str(errors[0])
        assert (report.reason, report.sequence_number, report.suspects) == (DIVERGENCES[name].reason, 3, (1,))
        assert [each.state for each in report.replicas] == [ReplicaState.WAITING] * 3
        assert (report.partitions, report.divergence) == (errors[0].report.partitions, errors[0].report.divergence)


async def test_reason_is_the_first_of_several_partitions() -> None:
    values = [X, X, X, zeros(4), X.astype("f8")]
    report = (await error_of(lambda ctx: ctx.all_reduce("SUM", values[replica()]), 5)).report
    assert (report.reason, report.suspects) == (Reason.SHAPE, (3, 4))


async def test_equal_calls_on_one_line_differ_by_column() -> None:
    async def program(ctx: ReplicaContext) -> None:
        await (ctx.barrier() if ctx.replica_id_in_sync_group == 0 else ctx.barrier())  # noqa: RUF034

    report = (await error_of(program)).report
    assert (report.reason, report.suspects) == (Reason.CALL_SITE, (0,))
    assert "They are different calls on one line: column 72 on replicas 1 and 2, column 16 on replica 0." in str(report)


class Moments(NamedTuple):
    mu: Any
    nu: Any


async def test_differing_structures_are_shown_by_their_smallest_parts() -> None:
    nests = OrderedDict(a=1, z=1), OrderedDict(z=1, a=1)
    error = await error_of(lambda ctx: ctx.all_reduce("SUM", nests[replica()]), 2)
    items = "[('a', *), ('z', *)]" if sys.version_info < (3, 12) else "{'a': *, 'z': *}"
    assert f"The structures differ: OrderedDict({items}) on replica 0, " in str(error)
    states = Moments([1], {}), Moments([1], ())
    error = await error_of(lambda ctx: ctx.all_reduce("SUM", states[replica()]), 2)
    assert "The structures differ at value.nu: {} on replica 0, () on replica 1." in str(error)


async def test_mismatch_raises_a_separate_error_in_every_waiting_replica() -> None:
    errors: dict[int, Any] = {}

    async def program(ctx: ReplicaContext) -> None:
        try:
            await (ctx.barrier() if replica() == 1 else ctx.all_reduce("SUM", 1))
        except CollectiveMismatchError as error:
            errors[replica()] = error
            raise
        pytest.fail("a replica has passed the mismatch")

    error = await error_of(program, 4)
    assert errors.keys() == {0, 1, 2, 3}
    assert all(each.report is error.report for each in errors.values())
    assert len({id(each) for each in errors.values()}) == 4  # tracebacks do not mix


# What a report holds.


def line_of(text: str) -> int:
    """Return the number of the one line of this file that ends with a comment."""
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    (found,) = (number for number, line in enumerate(lines, 1) if line.endswith(f"# {text}"))
    return found


async def inner(ctx: ReplicaContext) -> None:
    await ctx.all_reduce("SUM", np.zeros(3, np.float32))  # the call


async def usual(ctx: ReplicaContext) -> None:
    await ctx.barrier()  # the first barrier
    await inner(ctx)


async def diverge(ctx: ReplicaContext) -> None:
    if replica() == 1:
        await ctx.barrier(name="odd")  # the odd call
    await usual(ctx)


async def test_report_says_what_each_replica_does_and_where() -> None:
    async def program(ctx: ReplicaContext) -> None:
        await usual(ctx)
        await diverge(ctx)  # the divergence

    report = (await error_of(program)).report
    zero, one, two = report.replicas
    assert report.sequence_number == 2
    assert [(r.replica_id, r.device) for r in report.replicas] == [(i, f"CPU:{i}") for i in range(3)]
    assert (zero.call, one.call) == ("barrier()", "barrier(name='odd')")
    assert one.location == (__file__, line_of("the odd call"), "diverge")
    assert zero.location == two.location == (__file__, line_of("the first barrier"), "usual")
    assert zero.location is not None
    assert one.location is not None
    assert one.history == (
        CallRecord(0, "barrier()", zero.location),
        CallRecord(1, "all_reduce(SUM, float32[3])", one.history[1].location),
        CallRecord(2, "barrier(name='odd')", one.location),
    )
    assert one.history[1].location == (__file__, line_of("the call"), "inner")
    own = [(place.line, place.function) for place in one.stack if place.file == __file__]
    assert own == [(line_of("the divergence"), "program"), (line_of("the odd call"), "diverge")]
    assert "aiodist" not in {place.function for place in one.stack}


async def test_callers_of_a_call_in_a_task_do_not_include_the_task_group() -> None:
    async def program(ctx: ReplicaContext) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(diverge, ctx)

    text = str(await error_of(program))
    assert "await usual(ctx)" in text
    assert "anyio" not in text


async def test_scope_without_a_deadline_is_not_called_a_time_limit() -> None:
    async def program(ctx: ReplicaContext) -> None:
        if replica() == 2:
            await turns()
        with anyio.CancelScope() as scope:
            if replica() == 1:
                scope.cancel()
            await ctx.barrier()

    text = str(await error_of(program))
    assert "`anyio.CancelScope()`" in text
    assert "time limit" not in text


async def test_history_keeps_the_last_calls_and_is_shared_in_json() -> None:
    async def program(ctx: ReplicaContext) -> None:
        for _ in range(HISTORY + 10):
            await ctx.barrier()
        if replica() == 7:
            await ctx.all_reduce("SUM", 1)

    report = (await error_of(program, 64)).report
    assert [record.sequence_number for record in report.replicas[0].history] == list(range(10, HISTORY + 10))
    assert [record.sequence_number for record in report.replicas[7].history] == list(range(10, HISTORY + 11))
    histories = report.to_dict()["histories"]
    assert len(histories) == 2
    assert len(report.to_json()) < 2 * len(json.dumps(histories))


async def test_report_has_partitions_and_divergence_as_values() -> None:
    report = (await error_of(programs.other_kind)).report
    majority, minority = report.partitions
    assert isinstance(majority, Partition)
    assert (majority.replicas, majority.majority, majority.call.partition("(")[0]) == ((0, 1), True, "all_reduce")
    assert (minority.replicas, minority.majority, minority.call) == ((2,), False, "barrier()")
    assert isinstance(report.divergence, Divergence)
    assert (report.divergence.kind, report.divergence.replicas, report.divergence.others) == ("added", (2,), (0, 1))
    assert report.divergence.text in " ".join(str(report).split())
    assert all(line in str(report) for line in report.advice)
    assert report._repr_html_().count("<b>&gt; ") == str(report).count("\n> ")  # in notebooks the minority is bold


SCHEMA = json.loads((ROOT / "docs" / "report-schema.json").read_text(encoding="utf-8"))
TYPES: dict[str, type] = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool}


def check_schema(value: Any, schema: Any = SCHEMA) -> None:
    """Check a value, by those keywords of JSON Schema that the published schema uses."""
    if "$ref" in schema:
        check_schema(value, SCHEMA["$defs"][schema["$ref"].removeprefix("#/$defs/")])
    elif "anyOf" in schema:
        other, null = schema["anyOf"]
        assert null == {"type": "null"}
        if value is not None:
            check_schema(value, other)
    elif "type" not in schema:
        assert value in schema.get("enum", [schema.get("const")])
    else:
        assert type(value) is TYPES[schema["type"]]
        if type(value) is dict:
            assert set(value) == set(schema["properties"]) == set(schema["required"])
            for key, each in value.items():
                check_schema(each, schema["properties"][key])
        for each in value if type(value) is list else ():
            check_schema(each, schema["items"])


def test_schema_has_every_member_of_the_enumerations() -> None:
    parts = SCHEMA["$defs"]
    assert SCHEMA["properties"]["reason"]["enum"] == list(Reason)
    assert parts["replica"]["properties"]["state"]["enum"] == list(ReplicaState)
    assert parts["divergence"]["properties"]["kind"]["enum"] == list(DivergenceKind)


@each_of([programs.other_kind, programs.tie, programs.many_left, programs.left_out_of_a_join])
async def test_report_survives_json_and_pickle(program: Program) -> None:
    error = await error_of(program)
    data = json.loads(error.report.to_json())
    check_schema(data)
    copy = CollectiveReport.from_dict(data)
    for one in (copy, pickle.loads(pickle.dumps(copy)), pickle.loads(pickle.dumps(error)).report):
        assert (one, str(one), hash(one)) == (error.report, str(error.report), hash(error.report))
    with pytest.raises(ValueError, match="expected a report of schema 2, got 1"):
        CollectiveReport.from_dict(data | {"schema": 1})
    damaged: list[Any] = [{name: each for name, each in data.items() if name != key} for key in data]
    damaged += [[], data | {"replicas": 1}, data | {"replicas": [{"history": 9}]}, data | {"histories": []}]
    for each in damaged:
        with pytest.raises(ValueError, match="expected"):
            CollectiveReport.from_dict(each)


# Calls that look different and mean the same.


async def agreed(program: Program, order_check: str = "call_site") -> tuple[Any, ...]:
    return await run(mirrored(3, order_check), program)


async def test_line_of_a_finally_block_is_one_place() -> None:
    async def program(ctx: ReplicaContext) -> int:
        total = 0
        for _ in range(1):
            try:
                if replica() == 0:
                    continue  # the compiler copies the block for each way out
                if replica() == 1:
                    break
                await anyio.lowlevel.checkpoint()
            finally:
                total = await ctx.all_reduce("SUM", 1)
        return total

    assert await agreed(program) == (3, 3, 3)


@pytest.mark.parametrize("files", [("a.py", "a.py"), ("a.py", "b.py")])
async def test_module_loaded_twice_is_one_place_and_two_files_are_two(files: tuple[str, str]) -> None:
    source = "async def program(ctx):\n    return await ctx.all_reduce('sum', 1)\n"
    spaces: list[dict[str, Any]] = [{}, {}]
    for space, file in zip(spaces, files, strict=True):
        exec(compile(source, file, "exec"), space)

    def program(ctx: ReplicaContext) -> Any:
        return spaces[replica() == 1]["program"](ctx)

    await check_call_sites(program, "call_site", differ=files[0] != files[1])


async def check_call_sites(program: Program, order_check: str, *, differ: bool) -> None:
    """Check that the call site of replica 1 differs or, if not, that the sum of three ones is returned."""
    if differ:
        report = (await error_of(program, order_check=order_check)).report
        assert (report.reason, report.suspects) == (Reason.CALL_SITE, (1,))
    else:
        assert await agreed(program, order_check) == (3, 3, 3)


async def two_branches(ctx: ReplicaContext, name: str | None = None) -> Any:
    if replica() == 1:
        return await ctx.all_reduce("SUM", 1, name=name)
    return await ctx.all_reduce("SUM", 1, name=name)


async def helper(ctx: ReplicaContext) -> Any:
    return await ctx.all_reduce("SUM", 1)


async def through_a_helper(ctx: ReplicaContext) -> Any:
    if replica() == 1:
        return await helper(ctx)
    return await helper(ctx)


def new_group(ctx: ReplicaContext) -> ReplicaContext:
    return ctx.new_group(range(3))


async def group_through_a_helper(ctx: ReplicaContext) -> Any:
    group = new_group(ctx) if replica() == 1 else None
    return await helper(group or new_group(ctx))


@pytest.mark.parametrize(
    ("program", "order_check", "differ"),
    [
        (two_branches, "signature", False),
        (two_branches, "call_site", True),
        (partial(two_branches, name="total"), "call_site", False),
        (partial(two_branches, name="total"), "call_path", False),
        (through_a_helper, "call_site", False),
        (through_a_helper, "call_path", True),
        (group_through_a_helper, "call_site", False),
        (group_through_a_helper, "call_path", True),
    ],
)
async def test_call_sites_are_compared_as_order_check_says(program: Program, order_check: str, differ: bool) -> None:
    await check_call_sites(program, order_check, differ=differ)


async def test_factories_of_defaultdicts_are_not_compared() -> None:
    async def program(ctx: ReplicaContext) -> Any:
        me = replica()
        mine: Any = defaultdict(lambda: me, x=np.full(2, me))
        out: Any = [defaultdict(int, x=np.zeros(2, int))]
        total = await ctx.all_reduce("SUM", [mine], out=out)
        assert total[0]["x"].tolist() == [3, 3]
        assert (await ctx.all_reduce("SUM", [mine]))[0]["y"] == me
        await ctx.merge_call(lambda _, value: None, (mine,))
        return mine

    (first, *_) = await agreed(program)
    assert first["x"].tolist() == [0, 0]


class Merger:
    def __init__(self, factor: int) -> None:
        self.factor = factor

    def __call__(self, strategy: Any, value: Any) -> int:
        return scaled(self.factor, strategy, value)

    def merge(self, strategy: Any, value: Any) -> int:
        return scaled(self.factor, strategy, value)


def scaled(factor: int, strategy: Any, value: Any) -> int:
    return factor * sum(map(np.size, value.values))


@pytest.mark.parametrize(
    "make",
    [
        lambda factor: partial(partial(scaled), factor),
        lambda factor: Merger(factor).merge,
        Merger,
        lambda factor: lambda strategy, value: scaled(factor, strategy, value),
    ],
    ids=["partial", "bound method", "callable object", "closure"],
)
async def test_merge_functions_of_one_code_are_the_same_and_replica_0s_runs(make: Any) -> None:
    values = [np.zeros(2), np.zeros((1, 3), np.int8), np.float32(0)]
    assert await agreed(lambda ctx: ctx.merge_call(make(10 + replica()), (values[replica()],))) == (60, 60, 60)
