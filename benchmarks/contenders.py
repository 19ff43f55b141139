"""The contenders of a comparison: the forms of an op, and those of its peers that can run on this machine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import memfix
from memfix.checks.form_call import phases_of
from memfix.contract import FLOOR, Contract
from memfix.errors import UsageError, did_you_mean
from memfix.laws import NAIVE

from .peers import Comparison, Entry, Unavailable, comparison_of
from .workload import with_peers

PHASES = ("train", "forward")


@dataclass(frozen=True)
class Contenders:
    """The contenders that run on ``device``, and those that do not, with the reason."""

    contract: Contract
    """The op's contract, extended by the peers as forms."""
    comparison: Comparison
    device: str
    forms: tuple[str, ...]
    peers: tuple[str, ...]
    left_out: Mapping[str, str]

    @staticmethod
    def of(contract: Contract, device: str) -> Contenders:
        comparison = comparison_of(contract.name)
        loaded, left_out = {}, {}
        for name, peer in comparison.peers.items():
            try:
                loaded[name] = peer.loaded(device)
            except Unavailable as reason:
                left_out[name] = str(reason)
        own = with_peers(contract, comparison, {})
        for name, form in own.forms.items():
            if form.has_kernels and device == "cpu":
                left_out[name] = "its kernels need a GPU; interpreted, their time says nothing"
        forms = [name for name in (NAIVE, *own.forms) if name not in left_out]
        return Contenders(
            with_peers(contract, comparison, loaded), comparison, device, tuple(forms), tuple(loaded), left_out
        )

    def sources(self) -> dict[str, str]:
        own = dict.fromkeys(self.forms, f"memfix {memfix.__version__}")
        return own | {name: self.comparison.peers[name].source for name in self.peers}

    def chosen(self, forms: str | None, peers: str | None) -> Contenders:
        """Select the contenders that ``--forms`` and ``--peers`` name; refuse an unknown name."""
        return replace(
            self, forms=self._named("--forms", forms, self.forms), peers=self._named("--peers", peers, self.peers)
        )

    def _named(self, option: str, names: str | None, here: tuple[str, ...]) -> tuple[str, ...]:
        if names is None:
            return here
        wanted = [] if names == "none" else names.split(",")
        theirs = (
            self.comparison.peers
            if option == "--peers"
            else {NAIVE, *self.contract.forms} - self.comparison.peers.keys()
        )
        for name in wanted:
            if name not in theirs:
                raise UsageError(f"{option}: {self.contract.name} has no {name!r}{did_you_mean(name, theirs)}")
        return tuple(name for name in here if name in wanted)

    def names_at(self, entry: Entry, phase: str) -> list[str]:
        """Return the names of the contenders at one shape. The contract's floor is that of the longest phase."""
        forms = [name for name in self.forms if entry.forms is None or name in entry.forms]
        peers = [name for name in self.peers if entry.peers is None or name in entry.peers]
        is_longest = phase == longest_phase(self.contract)
        has_floor = phase in self.comparison.floors or (self.contract.floor is not None and is_longest)
        return [*([FLOOR] if has_floor else []), *forms, *peers]

    def simulatable(self, names: Iterable[str]) -> list[str]:
        """Select the contenders without another package's kernels, which the simulated meter may not know."""
        peers = self.comparison.peers
        return [name for name in names if name not in peers or not peers[name].packages]


def longest_phase(contract: Contract) -> str:
    return PHASES[0] if PHASES[0] in phases_of(contract) else PHASES[1]
