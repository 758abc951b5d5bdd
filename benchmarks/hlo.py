"""Read scheduled HLO text: computations, loops, collectives with bytes and groups, matmuls between start and done."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import re

COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "collective-permute",
    "all-to-all",
    "ragged-all-to-all",
    "collective-broadcast",
)
_BITS = {"pred": 8, "bf16": 16}
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) (?:\(.*\) -> .*)?\{$")
_NAME = re.compile(r"^(?:ROOT )?%?([\w.\-]+) = (.*)$")
_OPCODE = re.compile(r"\s*([a-z][a-z0-9\-]*)\((.*)$")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_CALLED = re.compile(r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)")
_CALLED_MANY = re.compile(r"(?:branch_computations|called_computations|calls)=\{([^}]*)\}")
_ARRAY = re.compile(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,<=\s]*)\]")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation; `shape` as printed, `operands` the names it reads, `text` the whole line."""

    name: str
    opcode: str
    shape: str
    operands: tuple[str, ...]
    called: tuple[str, ...]
    text: str

    @property
    def arrays(self) -> list[tuple[str, tuple[int, ...]]]:
        """Element type and dimensions of every array in the result."""
        return [
            (kind, tuple(int(re.sub(r"\D", "", d)) for d in dims.split(",") if d.strip()))
            for kind, dims in _ARRAY.findall(self.shape)
        ]


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective: `kind` without `-start`, `bytes` of its results on a device, `groups` of device numbers or pairs.

    `largest`: bytes of the largest array among the results, as compilers combine several. `loops`: how many while bodies
    it stands in. `matmuls`: those between its start and its done; None if synchronous. `computation`: where it stands.
    """

    kind: str
    name: str
    bytes: int
    largest: int
    groups: tuple[tuple[int, ...], ...]
    loops: int
    matmuls: int | None
    text: str
    computation: str


class Program:
    """A compiled module's text, taken apart."""

    def __init__(self, text: str):
        self.computations: dict[str, list[Instruction]] = {}
        self.entry = ""
        current: list[Instruction] | None = None
        for line in text.splitlines():
            head = _COMPUTATION.match(line.strip()) if not line.startswith(" ") else None
            if head and not line.startswith("HloModule"):
                current = self.computations.setdefault(head[2], [])
                if head[1]:
                    self.entry = head[2]
            elif line.startswith("}"):
                current = None
            elif current is not None:
                instruction = _parse(line.strip())
                if instruction is not None:
                    current.append(instruction)

    @property
    def num_instructions(self) -> int:
        """Instructions of all computations."""
        return sum(len(c) for c in self.computations.values())

    def count(self, opcode: str) -> int:
        """How many instructions have an opcode."""
        return sum(i.opcode == opcode for c in self.computations.values() for i in c)

    @functools.cached_property
    def depth(self) -> dict[str, int]:
        """For each computation reached from the entry, the largest number of while loops around it."""
        depth = {self.entry: 0}
        pending = [self.entry]
        while pending:
            name = pending.pop()
            for instruction in self.computations[name]:
                inside = depth[name] + (instruction.opcode == "while")
                for called in instruction.called:
                    if called in self.computations and depth.get(called, -1) < inside:
                        depth[called] = inside
                        pending.append(called)
        return depth

    @functools.cached_property
    def collectives(self) -> list[Collective]:
        """Every collective that the program can reach, in program order of each computation."""
        found = []
        for name, loops in self.depth.items():
            body = self.computations[name]
            for place, instruction in enumerate(body):
                kind, asynchronous = self._collective(instruction)
                if kind is None:
                    continue
                matmuls = None
                if asynchronous:
                    done = next(
                        (
                            n
                            for n in range(place + 1, len(body))
                            if instruction.name in body[n].operands and body[n].opcode.endswith("-done")
                        ),
                        place,
                    )
                    matmuls = sum(self.holds_matmul(i) for i in body[place + 1 : done])
                arrays = _results(instruction, kind, asynchronous)
                found.append(
                    Collective(
                        kind,
                        instruction.name,
                        nbytes(arrays),
                        max(nbytes([a]) for a in arrays),
                        _groups(instruction),
                        loops,
                        matmuls,
                        instruction.text,
                        name,
                    )
                )
        return found

    def is_under(self, collective: Collective, scope: str) -> bool:
        """Whether a collective was made under a named scope; the compiler's own ones where all matmuls around it were."""
        own = _OP_NAME.search(collective.text)
        if own is not None:
            return f"/{scope}/" in own[1]
        around = [_OP_NAME.search(i.text) for i in self.computations[collective.computation] if self.holds_matmul(i)]
        return any(around) and all(f"/{scope}/" in found[1] for found in around if found is not None)

    def _collective(self, instruction: Instruction) -> tuple[str | None, bool]:
        """The kind of a collective and whether it is a start; (None, False) for anything else."""
        if instruction.opcode == "async-start":
            for name in instruction.called:
                kinds = [i.opcode for i in self.computations.get(name, ()) if i.opcode in COLLECTIVES]
                if kinds:
                    return kinds[0], True
            return None, False
        for kind in COLLECTIVES:
            if instruction.opcode in (kind, f"{kind}-start"):
                return (None, False) if self._is_async_body(instruction) else (kind, instruction.opcode != kind)
        return None, False

    def _is_async_body(self, instruction: Instruction) -> bool:
        return instruction.name in self._async_bodies

    @functools.cached_property
    def _async_bodies(self) -> set[str]:
        called = {c for body in self.computations.values() for i in body if i.opcode == "async-start" for c in i.called}
        return {i.name for c in called for i in self.computations.get(c, ())}

    def holds_matmul(self, instruction: Instruction) -> bool:
        """Whether an instruction is a dot, a call of a gemm library, or a fusion or call with one inside."""
        if instruction.opcode in ("dot", "convolution"):
            return True
        if instruction.opcode == "custom-call":
            return bool(re.search(r'custom_call_target="[^"]*(gemm|matmul|cublas)', instruction.text))
        if instruction.opcode in ("fusion", "call", "async-start", "while", "conditional"):
            return any(self.holds_matmul(i) for name in instruction.called for i in self.computations.get(name, ()))
        return False

    def summary(self) -> dict[str, dict[str, int]]:
        """By kind: how many collectives, in loops, bytes of the largest, asynchronous, and with a matmul inside."""
        result: dict[str, dict[str, int]] = {}
        by_kind = collections.defaultdict(list)
        for c in self.collectives:
            by_kind[c.kind].append(c)
        for kind, group in sorted(by_kind.items()):
            result[kind] = {
                "count": len(group),
                "in_loops": sum(c.loops > 0 for c in group),
                "largest_bytes": max(c.bytes for c in group),
                "asynchronous": sum(c.matmuls is not None for c in group),
                "overlapped": sum(bool(c.matmuls) for c in group),
            }
        return result


def nbytes(arrays: list[tuple[str, tuple[int, ...]]]) -> int:
    """Bytes of arrays given as element type and dimensions; tokens and keys count nothing."""
    total = 0
    for kind, dims in arrays:
        digits = re.search(r"\d+", kind)
        bits = _BITS.get(kind) or (int(digits[0]) if digits else 0)
        total += math.prod(dims) * bits // 8
    return total


def _results(instruction: Instruction, kind: str, asynchronous: bool) -> list[tuple[str, tuple[int, ...]]]:
    arrays = instruction.arrays
    if asynchronous and kind != "all-reduce" and len(arrays) > 1:
        # A start returns (operands, results, context).
        arrays = [a for a in arrays if a != ("u32", ())]
        arrays = arrays[len(arrays) // 2 :]
    return arrays


def _groups(instruction: Instruction) -> tuple[tuple[int, ...], ...]:
    text = instruction.text
    pairs = re.search(r"source_target_pairs=\{(.*?)\}\}", text)
    listed = re.search(r"replica_groups=\{(\{.*?\})\}", text)
    found = pairs or listed
    if found:
        return tuple(tuple(int(n) for n in group.split(",")) for group in re.findall(r"\{([\d,]+)\}?", found[1]))
    # `[groups,size]<=[dims]T(permutation)`: the devices in row-major order of dims, transposed, then cut.
    short = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    if short is None:
        return ()
    import numpy as np

    shape, dims = ([int(n) for n in part.split(",")] for part in short.groups()[:2])
    devices = np.arange(math.prod(dims)).reshape(dims)
    if short[3]:
        devices = devices.transpose([int(n) for n in short[3].split(",")])
    return tuple(tuple(int(n) for n in group) for group in devices.reshape(shape))


def _parse(line: str) -> Instruction | None:
    line = re.sub(r"/\*.*?\*/", "", line)
    named = _NAME.match(line)
    if named is None:
        return None
    shape, rest = _split_shape(named[2])
    opcode = _OPCODE.match(rest)
    if opcode is None:
        return None
    arguments, attributes = _split_arguments(opcode[2])
    called = list(_CALLED.findall(attributes))
    for many in _CALLED_MANY.findall(attributes):
        called += re.findall(r"[\w.\-]+", many)
    parts = re.split(r",\s*(?![^\[{(]*[\]})])", arguments)
    operands = tuple(part.split()[-1].lstrip("%") for part in parts if part.strip())
    return Instruction(named[1], opcode[1], shape, operands, tuple(called), line)


def _split_shape(text: str) -> tuple[str, str]:
    """A leading shape, a tuple or one array, and what follows."""
    if not text.startswith("("):
        shape, _, rest = text.partition(" ")
        return shape, rest
    return _balanced(text)


def _split_arguments(text: str) -> tuple[str, str]:
    inside, rest = _balanced("(" + text)
    return inside[1:-1], rest


def _balanced(text: str) -> tuple[str, str]:
    level = 0
    for place, char in enumerate(text):
        level += (char == "(") - (char == ")")
        if level == 0:
            return text[: place + 1], text[place + 1 :]
    return text, ""
