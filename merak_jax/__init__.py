"""merak_jax: run a Flax train step with data, pipeline and tensor parallelism, with the numbers of one device."""

from merak_jax import errors
from merak_jax.mesh import emulate, make_mesh
from merak_jax.parallelize import ParallelStep, parallelize
from merak_jax.planning.plan import Plan
from merak_jax.schedules.registry import register_schedule

__all__ = ["ParallelStep", "Plan", "emulate", "errors", "make_mesh", "parallelize", "register_schedule"]
