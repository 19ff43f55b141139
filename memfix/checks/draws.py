"""What Hypothesis draws: calls for equality, small and full of edges; shapes for memory, as large as the cases."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from ..contract import Case, Contract, Dim, Layout
from .inputs import Draw


def smallest_failure(
    draws: st.SearchStrategy[Draw],
    check: Callable[[Draw], None],
    *,
    examples: int,
    random: bool = False,
    shrinks: int = 200,
    before: list[Draw] | None = None,
) -> tuple[Draw, Exception] | None:
    """Try ``check`` on ``examples`` draws, the same ones every time unless ``random``; the simplest draw that fails.

    After the first failure at most ``shrinks`` more draws are tried on the way to the simplest. ``before`` is what was
    drawn so when nothing failed: it is drawn again only where something does now. Where it is empty it is filled.
    """
    passed: list[Draw] = []
    failed_first = _first_failure(check, before or (), passed)
    if before and failed_first is None:
        return None
    check = _noting(check, passed)
    failures: list[tuple[Draw, Exception]] = []
    known: set[str] = set()
    tries_left = shrinks

    # Hypothesis draws by the text of this function: another text, other draws
    def attempt(draw: Draw) -> None:
        nonlocal tries_left
        if known:
            if tries_left <= 0 and draw.spelled() not in known:
                return
            tries_left -= 1
        try:
            check(draw)
        except Exception as error:
            failures.append((draw, error))
            known.add(draw.spelled())
            raise

    run = settings(
        max_examples=examples,
        derandomize=not random,
        deadline=None,
        database=None,
        print_blob=False,
        report_multiple_bugs=False,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )(given(draws)(attempt))
    try:
        run()
    except Exception:
        if not failures:
            raise
        return failures[-1]  # Hypothesis ends by replaying the smallest
    if before is not None and failed_first is None:
        before += passed
    return failed_first  # one that fails now and then has failed


def _noting(check: Callable[[Draw], None], passed: list[Draw]) -> Callable[[Draw], None]:
    """The check, with what passes written down; what has passed before is not asked again."""
    before = {draw.spelled() for draw in passed}

    def noting(draw: Draw) -> None:
        if draw.spelled() not in before:
            check(draw)
            passed.append(draw)

    return noting


def _first_failure(
    check: Callable[[Draw], None], draws: Iterable[Draw], passed: list[Draw]
) -> tuple[Draw, Exception] | None:
    for draw in draws:
        try:
            check(draw)
        except Exception as error:
            return draw, error
        passed.append(draw)
    return None


@st.composite
def equality_draws(draw: Any, contract: Contract, dtype: str) -> Draw:
    """A call small enough to compute: any dims, chunk sizes at and around the edges, layouts, frozen inputs."""
    dims: dict[str, int] = {}
    shape_dims = contract.shape_dims()
    for dim in shape_dims:
        dims[dim] = draw(_sizes(contract.dims[dim]), label=dim)
    for dim, spec in contract.dims.items():
        if dim not in dims:
            anywhere = _sizes(spec)
            near = {edge for axis in shape_dims for edge in _edges_of(dims[axis])}
            # the smallest ones twice: what is lost once a chunk shows where there are many chunks
            edges = [
                edge
                for edge in [*sorted(near), *_SMALL_CHUNKS]
                if spec.low <= edge <= spec.high and edge % spec.multiple_of == 0
            ]
            dims[dim] = draw(st.sampled_from(edges) | anywhere if edges else anywhere, label=dim)
    choices = _choices(draw, contract)
    seed = draw(st.integers(0, 2**16))
    share = draw(st.sampled_from([0.3, 0.0, 0.3, 0.0, 0.3, 1.0]))  # seldom all: then little is left to compare
    # large values show an exponential that nobody shifted, and those between what a trained model gives
    magnitude = draw(st.sampled_from([1.0, 1.0, 3.0, 8.0]))
    present = _present(draw, contract)
    inputs = [spec for spec in contract.inputs if not spec.optional or spec.name in present]
    layouts: dict[str, Layout] = {spec.name: draw(st.sampled_from(spec.layouts), label=spec.name) for spec in inputs}
    grads = [spec.name for spec in inputs if spec.grad]
    frozen = draw(st.sets(st.sampled_from(grads))) if grads and draw(st.integers(0, 3)) == 3 else set()
    case = Case("drawn", {dim: dims[dim] for dim in contract.dims}, choices, dtype, present)
    return Draw(case, seed, share, magnitude, layouts, frozenset(frozen))


def _choices(draw: Any, contract: Contract) -> dict[str, Any]:
    """Half of the calls are plain: what every call does is not hidden behind what an option adds."""
    is_plain = draw(st.booleans(), label="plain") if len(contract.choices) > 2 else False
    return {
        key: values[0] if is_plain else draw(st.sampled_from(values), label=key)
        for key, values in contract.choices.items()
    }


def _present(draw: Any, contract: Contract) -> tuple[str, ...]:
    """Each optional input is there one time in three: often enough, and most calls stay plain."""
    optional = [spec.name for spec in contract.inputs if spec.optional]
    return tuple(name for name in optional if draw(st.sampled_from([False, False, True]), label=name))


def _sizes(dim: Dim, low: int | None = None, high: int | None = None) -> st.SearchStrategy[int]:
    """The sizes that a dim may have, in its own range or in another one."""
    step = dim.multiple_of
    first = -(-(dim.low if low is None else low) // step)
    last = max(first, (dim.high if high is None else high) // step)
    return st.integers(first, last).map(lambda number: number * step)


_SMALL_CHUNKS = (1, 2, 3, 5)


def _edges_of(size: int) -> set[int]:
    """Chunk sizes that meet ``size`` exactly, fall one short or leave one over; and some that make many chunks."""
    return {*_SMALL_CHUNKS, size - 1, size, size + 1, (size - 1) // 2}


@st.composite
def memory_draws(draw: Any, contract: Contract) -> Draw:
    """A shape near one of the cases: too large to compute, free to simulate.

    Axes are from a quarter to five quarters of the case's, options such as chunk sizes from one to two times: so
    no draw takes many more chunks, and so more time, than the case itself. The largest case is measured as it
    is; what a draw near it could show, a draw near a smaller one shows sooner.
    """
    by_size = sorted(contract.cases.values(), key=lambda case: math.prod(case.dims.values()))
    near = draw(st.sampled_from(by_size[:-1] or by_size))
    axes = set(contract.shape_dims())
    dims = {}
    for dim, size in near.dims.items():
        low, high = (size // 4, size * 5 // 4) if dim in axes else (size, 2 * size)
        low = max(contract.dims[dim].low, low)
        dims[dim] = draw(_sizes(contract.dims[dim], low, high), label=dim)
    choices = {key: draw(st.sampled_from(values), label=key) for key, values in contract.choices.items()}
    dtype = draw(st.sampled_from(contract.dtypes))
    # only what matrix products take as it is: other strides are copied by the library, not by the form
    layouts: dict[str, Layout] = {
        spec.name: draw(st.sampled_from([layout for layout in spec.layouts if layout != "strided"] or spec.layouts))
        for spec in contract.inputs
    }
    return Draw(Case("drawn", dims, choices, dtype, _present(draw, contract)), layouts=layouts)
