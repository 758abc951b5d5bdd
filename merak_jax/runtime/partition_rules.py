"""Which dimension of which parameter the user wants split over `tensor`: patterns of paths, and a PartitionSpec for each."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from jax.sharding import PartitionSpec

from merak_jax.errors import PlanError


class PartitionRules:
    """Rules in the order in which they are tried: the first pattern found in a path counts.

    A pattern is a regular expression, searched in the path with slashes, `params/h_0/mlp/up/kernel`. A spec has "tensor" for the
    dimension that is split, or for none.
    """

    def __init__(self, rules: Mapping[str, PartitionSpec]):
        self.rules: list[tuple[re.Pattern, PartitionSpec]] = []
        for pattern, spec in rules.items():
            if not isinstance(pattern, str) or not isinstance(spec, PartitionSpec):
                raise PlanError(f"partition_rules maps patterns to PartitionSpecs, got {pattern!r}: {spec!r}")
            axes = [a for entry in spec for a in (entry if isinstance(entry, tuple) else (entry,)) if a is not None]
            if axes not in ([], ["tensor"]):
                raise PlanError(
                    f"partition_rules[{pattern!r}] = {spec}: a parameter of a block is split along one dimension, over 'tensor'; "
                    "stages and copies are the plan's"
                )
            try:
                self.rules.append((re.compile(pattern), spec))
            except re.error as error:
                raise PlanError(f"partition_rules: {pattern!r} is no regular expression: {error}") from None

    def dimension(self, path: str, shape: Sequence[int], size: int) -> tuple[int | None] | None:
        """`(dimension,)` that is split of a leaf, `(None,)` where it is to be whole, None where no rule says anything.

        Raises PlanError where the spec does not fit the leaf.
        """
        for pattern, spec in self.rules:
            if not pattern.search(with_slashes(path)):
                continue
            dimension = next((d for d, entry in enumerate(spec) if entry is not None), None)
            if len(spec) > len(shape):
                raise PlanError(f"partition_rules[{pattern.pattern!r}] = {spec} is longer than {path}{list(shape)}")
            if dimension is not None and shape[dimension] % size:
                raise PlanError(
                    f"partition_rules[{pattern.pattern!r}] = {spec}: dimension {dimension} of {path}{list(shape)} is not "
                    f"divisible by tensor={size}"
                )
            return (dimension,)
        return None

    def of_blocks(
        self, paths: Sequence[str], shape: Sequence[int], stacked: bool, size: int
    ) -> tuple[int | None] | None:
        """What `dimension` says of a parameter of equal blocks, of one block's part.

        `paths`: of the leaves, one for each block, or one with all blocks in dimension 0 if it is `stacked`.
        """
        found = [self.dimension(path, shape, size) for path in paths]
        if any(own != found[0] for own in found):
            other = next(path for path, own in zip(paths, found) if own != found[0])
            raise PlanError(
                f"partition_rules say something else for {paths[0]} than for {other}, which is the same in another block"
            )
        if not found or found[0] is None or found[0][0] is None or not stacked:
            return found[0] if found else None
        if found[0][0] == 0:
            raise PlanError(f"partition_rules split {paths[0]} along its layers, which the stages are")
        return (found[0][0] - 1,)

    def check_used(self, inside: Iterable[str], others: Iterable[str]) -> None:
        """Raise PlanError for a pattern that is found in no path of a block's parameter, `inside`; `others`: all other paths."""
        inside, others = list(map(with_slashes, inside)), list(map(with_slashes, others))
        for pattern, _ in self.rules:
            if any(pattern.search(path) for path in inside):
                continue
            elsewhere = next((path for path in others if pattern.search(path)), None)
            if elsewhere is not None:
                raise PlanError(
                    f"partition_rules: {pattern.pattern!r} is found in {elsewhere}, which is no parameter of a block; what stands "
                    "outside of blocks is split over pipe and tensor together, as the plan says"
                )
            raise PlanError(
                f"partition_rules: {pattern.pattern!r} is found in no path of a block's parameter; they are like {inside[0]}"
                if inside
                else f"partition_rules: {pattern.pattern!r} is for parameters of blocks, and no blocks were found"
            )


NO_RULES = PartitionRules({})


def with_slashes(path: str) -> str:
    """A path of JAX's, `.params['h_0']['kernel']`, with slashes."""
    return "/".join(a or b or c for a, b, c in re.findall(r"\['([^']*)'\]|\[(\w+)\]|\.(\w+)", path))
