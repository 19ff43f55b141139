"""Draw calls for equality, small and full of edge cases, and shapes for memory, as large as the cases.

Hypothesis turns bytes into a draw, and simplifies a draw that fails. The bytes come from memfix: fresh random bytes for
each draw, so that no draw is a variation of the one before, and from a seed, so that every process draws the same.

Options fail in pairs, such as a class weight with a summed loss. So until every two options have met in a call, each
call is the one of several candidates in which most new pairs meet.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st
from hypothesis.database import InMemoryExampleDatabase

from ..contract import Case, Contract, Dim, Layout, Pattern, TensorSpec
from .inputs import UPSTREAMS, Draw, Mode

Draws = st.SearchStrategy[Draw]
_ENOUGH_BYTES = 2048
_CANDIDATES = 8


@dataclass(frozen=True)
class Drawn:
    """A draw, with the bytes that it was made from and the strategy that made it."""

    draw: Draw
    made_of: bytes
    draws: Draws

    def changed(self, change: Callable[[Draw], Draw]) -> Drawn:
        """This call after ``change``; the simpler calls that a failure leads to are changed too."""
        return Drawn(change(self.draw), self.made_of, self.draws.map(change))


def drawn(draws: Draws, contract: Contract, examples: int, *, seed: int = 0) -> list[Drawn]:
    """Return the simplest draw and random others, ``examples`` in all. The same ``seed`` gives the same draws."""
    every = made(draws, Random(seed))
    to_meet = pairs(options_of(contract))
    found: list[Drawn] = []
    while len(found) < examples:
        several = itertools.islice(every, _CANDIDATES if to_meet and found else 1)
        found.append(max(several, key=lambda call: len(to_meet & pairs(options_taken(contract, call.draw)))))
        to_meet -= pairs(options_taken(contract, found[-1].draw))
    return found


def usual_draws(draws: Draws, contract: Contract) -> Draws:
    """``draws`` with the sizes, layouts and options that models have: kernels have fast paths for those."""
    return draws.map(partial(_as_usual, contract))


def usual(draws: Draws, contract: Contract, *, seed: int = 0) -> Drawn:
    """Return, of several :func:`usual_draws`, the one with the longest axes and the shortest chunks."""
    axes = contract.shape_dims()

    def num_chunks(call: Drawn) -> float:
        return math.prod(size if dim in axes else 1 / max(1, size) for dim, size in call.draw.case.dims.items())

    _, *several = itertools.islice(made(usual_draws(draws, contract), Random(seed)), 1 + _CANDIDATES)
    return max(several, key=num_chunks)


def spoiled(simplest: Drawn, contract: Contract, spec: TensorSpec) -> list[Drawn]:
    """Return two small calls with a NaN in every row of one input: at usual sizes, and at sizes below a CPU's vector
    width. No token is ignored, since its NaN would be ignored too."""

    def spoil(draw: Draw, *, in_usual_sizes: bool) -> Draw:
        as_usual = _as_usual(contract, draw)
        dims = as_usual.case.dims if in_usual_sizes else {name: _few(contract.dims[name]) for name in draw.case.dims}
        case = replace(as_usual.case, dims=dims, present=(spec.name,) if spec.optional else ())
        return replace(as_usual, case=case, share=0.0, spoiled=spec.name)

    return [simplest.changed(partial(spoil, in_usual_sizes=wanted)) for wanted in (True, False)]


def in_mode(call: Drawn, contract: Contract, mode: Mode) -> Drawn:
    """Return ``call`` in another mode, with the sizes and layouts that models have."""

    def changed(draw: Draw) -> Draw:
        usual = _as_usual(contract, draw)
        case = replace(usual.case, choices=draw.case.choices, present=draw.case.present)
        return replace(usual, case=case, mode=mode)

    return call.changed(changed)


def _as_usual(contract: Contract, draw: Draw) -> Draw:
    axes = contract.shape_dims()
    dims = {dim: _rounded(contract.dims[dim], size) if dim in axes else size for dim, size in draw.case.dims.items()}
    choices = {name: values[0] for name, values in contract.choices.items()}
    layouts = {spec.name: spec.layouts[0] for spec in contract.inputs}
    case = replace(draw.case, dims=dims, choices=choices, present=())
    return replace(
        draw, case=case, share=0.3, magnitude=1.0, layouts=layouts, frozen=frozenset(), patterns={}, dtypes={},
        upstream="dense",
    )  # fmt: skip


def made(draws: Draws, source: Random) -> Iterator[Drawn]:
    """Yield the simplest draw first, then random ones without end."""
    made: list[Draw] = []
    make = _test(draws, made.append).hypothesis.fuzz_one_input
    made_of = bytes(_ENOUGH_BYTES)
    while True:
        if make(made_of) is not None:  # Hypothesis accepts most byte strings
            yield Drawn(made[-1], made_of, draws)
        made_of = source.randbytes(_ENOUGH_BYTES)


Options = Mapping[str, Sequence[object]]
"""Values by option: those of a choice, and for an optional input whether it is present."""


def options_of(contract: Contract) -> Options:
    return {**contract.choices, **{spec.name: (False, True) for spec in contract.inputs if spec.optional}}


def options_taken(contract: Contract, draw: Draw) -> Options:
    choices, present = draw.case.choices, draw.case.present
    return {name: (choices.get(name, name in present),) for name in options_of(contract)}


def pairs(options: Options) -> set[tuple[str, str]]:
    """Return all pairs of values of two different options, as text."""
    return {
        (f"{one}={value!r}", f"{other}={another!r}")
        for one, other in itertools.combinations(options, 2)
        for value in options[one]
        for another in options[other]
    }


def smallest_failure(
    check: Callable[[Draw], None], calls: Sequence[Drawn], *, shrinks: int = 200
) -> tuple[Draw, Exception] | None:
    """Run ``check`` on ``calls`` until one fails; return the simplest draw that still fails, with its error.

    At most ``shrinks`` more draws are tried on the way to the simplest.
    """
    for call in calls:
        try:
            check(call.draw)
        except Exception as error:
            return _simplified(check, call, error, shrinks) if shrinks else (call.draw, error)
    return None


def _simplified(check: Callable[[Draw], None], call: Drawn, error: Exception, shrinks: int) -> tuple[Draw, Exception]:
    failures = [(call.draw, error)]
    known = {call.draw.spelled()}
    tries_left = shrinks

    def attempt(draw: Draw) -> None:
        nonlocal tries_left
        if tries_left <= 0 and draw.spelled() not in known:
            return
        tries_left -= 1
        try:
            check(draw)
        except Exception as error:
            failures.append((draw, error))
            known.add(draw.spelled())
            raise

    test = _test(call.draws, attempt)
    with contextlib.suppress(Exception):
        test.hypothesis.fuzz_one_input(call.made_of)  # stores the failure in the database, where test() finds it
    with contextlib.suppress(Exception):
        test()
    return failures[-1]  # Hypothesis replays the smallest last; a flaky failure has been recorded before


def _test(draws: Draws, check: Callable[[Draw], None]) -> Any:
    """``check`` as a Hypothesis test that searches for no failure, but simplifies one from its database."""

    def test(draw: Draw) -> None:
        check(draw)

    how = settings(
        deadline=None,
        database=InMemoryExampleDatabase(),
        print_blob=False,
        report_multiple_bugs=False,
        phases=(Phase.reuse, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    return how(given(draws)(seeded(0)(test)))


def _frozen(draw: Any, grads: Sequence[str]) -> frozenset[str]:
    """Draw the inputs without a gradient: most often none, else any of them, or all but one."""
    kind = draw(_FOUR) if grads else 0
    if kind == 3:
        return frozenset(draw(st.sets(_one_of(*grads))))
    return frozenset(grads) - {draw(_one_of(*grads))} if kind == 2 else frozenset()


@st.composite
def equality_draws(draw: Any, contract: Contract, dtype: str) -> Draw:
    """Draw a call small enough to compute: any dims, chunk sizes at and near the edges, layouts, frozen inputs."""
    dims: dict[str, int] = {}
    shape_dims = contract.shape_dims()
    for dim in shape_dims:
        dims[dim] = draw(_axis_sizes(contract.dims[dim]), label=dim)
    for dim, spec in contract.dims.items():
        if dim not in dims:
            anywhere = _sizes(spec)
            near = {edge for axis in shape_dims for edge in _edges_of(dims[axis])}
            # small chunk sizes come twice: an error that each chunk adds shows where there are many
            edges = [
                edge
                for edge in [*sorted(near), *_SMALL_CHUNKS]
                if spec.low <= edge <= spec.high and edge % spec.multiple_of == 0
            ]
            dims[dim] = draw(_one_of(*edges) | anywhere if edges else anywhere, label=dim)
    choices = _choices(draw, contract)
    seed = draw(_SEEDS)
    share = draw(_one_of(*[0.3, 0.0] * 5, 0.3, 1.0))  # seldom 1.0, which leaves little to compare
    # large values show an exponential without a shift, small ones a rounding before a comparison, and those between,
    # as a trained model has them, a rounding before a softmax; extreme ones an exponential in float32
    magnitude = draw(_one_of(1.0, 5.0, 3.0, 8.0, 0.1, 100.0))
    present = _present(draw, contract)
    inputs = [spec for spec in contract.inputs if not spec.optional or spec.name in present]
    layouts: dict[str, Layout] = {spec.name: draw(_one_of(*spec.layouts), label=spec.name) for spec in inputs}
    grads = [spec.name for spec in inputs if spec.grad]
    frozen = _frozen(draw, grads)
    case = Case("drawn", {dim: dims[dim] for dim in contract.dims}, choices, dtype, present)
    patterns: dict[str, Pattern] = {
        spec.name: draw(_one_of(*spec.patterns), label=f"pattern of {spec.name}")
        for spec in inputs
        if spec.has_patterns
    }
    upstream = draw(_one_of(*UPSTREAMS), label="upstream")
    dtypes = {
        spec.name: dtype
        for spec in inputs
        if spec.also_in and (dtype := draw(_one_of(None, *spec.also_in), label=f"dtype of {spec.name}"))
    }
    return Draw(case, seed, share, magnitude, layouts, frozen, patterns, upstream, dtypes=dtypes)


def _choices(draw: Any, contract: Contract) -> dict[str, Any]:
    """Draw the choices. Half of the calls take the first values, so that no option hides an error of the plain call."""
    is_plain = draw(_BOOLEANS, label="plain") if len(contract.choices) > 2 else False
    return {
        key: values[0] if is_plain else draw(_any_of(values), label=key) for key, values in contract.choices.items()
    }


def _present(draw: Any, contract: Contract) -> tuple[str, ...]:
    """Draw which optional inputs are present, each one time in three: often enough, while most calls stay plain."""
    optional = [spec.name for spec in contract.inputs if spec.optional]
    return tuple(name for name in optional if draw(_one_of(False, False, True), label=name))


@functools.lru_cache(maxsize=4096, typed=True)
def _one_of(*values: Any) -> st.SearchStrategy[Any]:
    """One of ``values``. Cached, because Hypothesis takes as long to validate a new strategy as to draw from it."""
    return st.sampled_from(values)


def _any_of(values: Sequence[Any]) -> st.SearchStrategy[Any]:
    """One of a contract's own values, which may be lists and then cannot be cached."""
    try:
        return _one_of(*values)
    except TypeError:
        return st.sampled_from(values)


_SEEDS, _FOUR, _BOOLEANS = st.integers(0, 2**16), st.integers(0, 3), st.booleans()


@functools.cache
def _axis_sizes(dim: Dim) -> st.SearchStrategy[int]:
    """Draw sizes, half of them from the lower third: most errors show there, and sooner."""
    return _sizes(dim, high=dim.low + (dim.high - dim.low) // 3) | _sizes(dim)


def _few(dim: Dim) -> int:
    """Return the third smallest size. At the smallest, such as one key, an input often does not affect the output."""
    return min(dim.high, dim.low + 2 * dim.multiple_of)


def _rounded(dim: Dim, size: int) -> int:
    """Return the next multiple of eight, or the one before, or ``size`` itself where the dim allows neither."""
    step = math.lcm(8, dim.multiple_of)
    fitting = [near for near in (-(-size // step) * step, size // step * step) if dim.low <= near <= dim.high]
    return fitting[0] if fitting else size


@functools.lru_cache(maxsize=4096)
def _sizes(dim: Dim, low: int | None = None, high: int | None = None) -> st.SearchStrategy[int]:
    """The sizes that a dim may have, in its own range or in another one."""
    step = dim.multiple_of
    first = -(-(dim.low if low is None else low) // step)
    last = max(first, (dim.high if high is None else high) // step)
    # from 0, so that bytes of 0 make the smallest size
    return st.integers(0, last - first).map(lambda number: (first + number) * step)


_SMALL_CHUNKS = (1, 2, 3, 5)
_DENSE = ("contiguous", "transposed")
"""Layouts that matrix products take without a copy: the library would make that copy, not the form."""


def _edges_of(size: int) -> set[int]:
    """Chunk sizes equal to ``size``, one smaller or one larger, and some that make many chunks."""
    return {*_SMALL_CHUNKS, size - 1, size, size + 1, (size - 1) // 2}


def memory_calls(contract: Contract, examples: int) -> list[Drawn]:
    """Return random shapes: one above each case, and others near the smaller cases, at least ``examples`` in all.

    In every second call some inputs take no gradient: first one of them, each in turn, then all but one. The calls are
    the same for every form. They are drawn once and cached.
    """
    name = name_of_draws(contract, contract.cases, examples)
    if name not in _FOR_MEMORY:
        _FOR_MEMORY[name] = _memory_calls(contract, examples)
    return _FOR_MEMORY[name]


_FOR_MEMORY: dict[str, list[Drawn]] = {}


def name_of_draws(contract: Contract, *more: object) -> str:
    """Return a cache key: all of a contract that decides what is drawn, and ``more``. Copies of a contract share it."""
    return repr((contract.name, contract.dims, contract.choices, contract.inputs, contract.dtypes, *more))


def _memory_calls(contract: Contract, examples: int) -> list[Drawn]:
    above = [drawn(memory_draws(contract, case.name), contract, 2)[1] for case in contract.cases.values()]
    near = drawn(memory_draws(contract), contract, max(examples - len(above), (examples + 1) // 2))
    calls = [*above, *near]
    grads = [spec.name for spec in contract.inputs if spec.grad]
    if len(grads) > 1:
        one, all_but_one = ([frozenset(some) for some in itertools.combinations(grads, n)] for n in (1, len(grads) - 1))
        frozen = itertools.cycle([*one, *reversed(all_but_one)])
        calls[1::2] = [call.changed(partial(replace, frozen=next(frozen))) for call in calls[1::2]]
    return calls


@st.composite
def memory_draws(draw: Any, contract: Contract, above: str | None = None) -> Draw:
    """Draw a shape near one of the cases: too large to compute, free to simulate.

    Axes are a quarter to five quarters of the case's, and options such as chunk sizes one to four times: so no draw
    takes many more chunks, and more time, than the case itself. No draw is near the largest case: what it could show, a
    draw near a smaller case shows sooner. ``above`` a case, axes are up to twice as long and options twice as large: a
    cap or a branch for large sizes shows there.
    """
    by_size = sorted(contract.cases.values(), key=lambda case: math.prod(case.dims.values()))
    near = contract.cases[above] if above else draw(st.sampled_from(by_size[:-1] or by_size))
    axes = set(contract.shape_dims())
    dims = {}
    for dim, size in near.dims.items():
        low, high = (size // 4, size * 5 // 4) if dim in axes else (size, 4 * size)
        if above:
            low, high = (size + 1 if dim in axes else 2 * size), 2 * size
        low = max(contract.dims[dim].low, low)
        dims[dim] = draw(_sizes(contract.dims[dim], low, high), label=dim)
    choices = {key: draw(_any_of(values), label=key) for key, values in contract.choices.items()}
    dtype = draw(_one_of(*contract.dtypes))
    layouts: dict[str, Layout] = {
        spec.name: draw(_one_of(*([layout for layout in spec.layouts if layout in _DENSE] or spec.layouts)))
        for spec in contract.inputs
    }
    return Draw(Case("drawn", dims, choices, dtype, _present(draw, contract)), layouts=layouts)
