"""At which of its dimensions a class is split, also where heads are reshaped into fewer groups than parts.

Splitting 32 heads 16 ways splits them as 8 groups of 4 into 8 x 2 parts: contiguous parts of the merged
dimension are parts of a group. A value that has the groups alone (keys, values) is whole on every device, and so
is what it is made of: the layout of grouped-query attention (Ainslie et al. 2023, "GQA") in Megatron-LM.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from merak_jax.partition.dimensions import CARRY, PARAMETER, Dimensions, Sum, Value


@dataclass(frozen=True)
class ClassSplit:
    """How one class is split, if it can be.

    Attributes:
      nodes: its dimensions that are split; all others are whole.
      minors: classes of which parts are split together with it: heads within a group.
      grouped: sizes of the (groups, heads within a group) that are split together.
      why_not: why it cannot be split, in words; None if it can.
    """

    nodes: frozenset[int] = frozenset()
    minors: frozenset[int] = frozenset()
    grouped: frozenset[tuple[int, int]] = frozenset()
    why_not: str | None = None


class ClassSplits:
    """Finds how classes are split `ways` ways; `whole` are classes that are not split in any case."""

    def __init__(self, found: Dimensions, ways: int, whole: Iterable[int]) -> None:
        self.found, self.ways, self.whole = found, ways, frozenset(whole)
        find = found.classes.find
        self.members: dict[int, list[int]] = {}
        for node in range(len(found.classes.sizes)):
            self.members.setdefault(find(node), []).append(node)

    def of(self, c: int) -> ClassSplit:
        """Return the split of class `c`, by sizes alone or with heads in groups."""
        members, sizes = self.members[c], self.found.classes.sizes
        indivisible = sorted({sizes[n] for n in members if sizes[n] % self.ways})
        if not indivisible:
            return ClassSplit(frozenset(members))
        why_not = f"{indivisible[0]} not divisible by {self.ways}"
        minors = self._minors(c, indivisible)
        return (self._grouped(c, minors) if minors else None) or ClassSplit(why_not=why_not)

    @cached_property
    def _values(self) -> dict[int, list[Value]]:
        """The values that a class is a dimension of; what is made of constants and side inputs is left out."""
        values: dict[int, list[Value]] = {}
        for value in self.found.values:
            if value.origin & (CARRY | PARAMETER):
                for c in dict.fromkeys(self.found.classes_of(value)):
                    values.setdefault(c, []).append(value)
        return values

    def _minors(self, c: int, sizes: Iterable[int]) -> dict[int, int]:
        """Return the classes that continue the split of class `c` behind groups, and the number of groups."""
        find, all_sizes = self.found.classes.find, self.found.classes.sizes
        behind: dict[int, set[tuple[int, int, int]]] = {}
        for major, minor, place in self.found.companions:
            behind.setdefault(find(minor), set()).add((find(major), all_sizes[major], place))
        summed = {find(s.node) for s in self.found.sums if s.direction == "forward"}
        minors = {}
        for minor, places in behind.items():
            groups = next(iter(places))[1]
            lengths = {all_sizes[n] for n in self.members[minor]}
            continues = (
                places == {(c, groups, 1)}
                and groups in sizes
                and self.ways % groups == 0
                and len(lengths) == 1
                and min(lengths) % (self.ways // groups) == 0
            )
            if continues and minor not in summed | self.whole | {c} and not self.found.classes.is_cut(minor):
                if all(self._continued(v, c, minor, groups) for v in self._values.get(minor, ())):
                    minors[minor] = groups
        return minors

    def _continued(self, value: Value, c: int, minor: int, groups: int) -> bool:
        """Whether `value`, that has `minor`, has it once, with the groups, and is no weight."""
        here = Counter(self.found.classes_of(value))
        sizes = [self.found.classes.sizes[n] for n in value.nodes if n is not None and self.found.classes.find(n) == c]
        return not value.is_weight and here[minor] == 1 and sizes == [groups]

    def _grouped(self, c: int, minors: dict[int, int]) -> ClassSplit | None:
        """Return the split of class `c` where groups are split together with `minors`; None if it moves data."""
        find, sizes = self.found.classes.find, self.found.classes.sizes
        behind = {(major, minor) for major, minor, _ in self.found.companions}
        values: dict[int, Value] = {}
        # The heads of the same value for groups that are split further.
        heads: dict[int, int] = {}
        for value in self._values.get(c, ()):
            nodes = [n for n in value.nodes if n is not None]
            further = [n for n in nodes if find(n) in minors]
            for n in (n for n in nodes if find(n) == c):
                values[n] = value
                if sizes[n] % self.ways and further:
                    if len(further) > 1 or minors[find(further[0])] != sizes[n]:
                        return None
                    heads[n] = further[0]
        whole = {n for n in values if sizes[n] % self.ways and n not in heads}

        along: dict[int, list[int]] = {}
        for a, b in self.found.edges:
            if a in values and b in values:
                along.setdefault(a, []).append(b)
                along.setdefault(b, []).append(a)
        # What a whole value is made of, or becomes without groups, is whole too.
        pending = list(whole)
        while pending:
            n = pending.pop()
            for other in along.get(n, ()):
                if other in heads:
                    # Every device takes its part of keys or values; parts of a weight's gradient would be gathered.
                    if sizes[other] != sizes[n] or values[n].is_weight:
                        return None
                elif other not in whole:
                    whole.add(other)
                    pending.append(other)
        for n in heads:
            for other in along.get(n, ()):
                if other not in heads and other not in whole and (n, heads[n]) not in behind:
                    return None
        split = frozenset(n for n in self.members[c] if n not in whole and (n in heads or not sizes[n] % self.ways))
        if not any(values[n].is_weight for n in split if n in values):
            return None
        used = frozenset(find(n) for n in heads.values())
        return ClassSplit(split, used, frozenset((sizes[n], sizes[m]) for n, m in heads.items()))


def sums_of(found: Dimensions, splits: Iterable[ClassSplit]) -> list[Sum]:
    """Return the sums over `tensor` that these splits cause, each once, in its largest type."""
    splits = list(splits)
    nodes = frozenset[int]().union(*(s.nodes for s in splits))
    minors = frozenset[int]().union(*(s.minors for s in splits))
    sums: dict[object, Sum] = {}
    for s in found.sums:
        if s.node in nodes or found.classes.find(s.node) in minors:
            known = sums.setdefault(s.key, s)
            if s.nbytes > known.nbytes:
                sums[s.key] = s
    return list(sums.values())
