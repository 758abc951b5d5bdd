"""One error class per user mistake: each message names what, where, the numbers, and the change that fixes it."""


class MerakError(Exception):
    """Base of every error that merak_jax raises on purpose."""


class MeshError(MerakError, ValueError):
    """The mesh does not fit the devices, has unknown axis names, or has Explicit axes."""


class BatchError(MerakError, ValueError):
    """The batch cannot be cut into `num_microbatches` on every data shard."""


class PlanError(MerakError, ValueError):
    """An argument of `parallelize` is unknown, out of range or contradicts another one."""


class TraceError(MerakError, ValueError):
    """The train step cannot be traced into one gradient call and one update."""


class GradientCallError(TraceError):
    """The train step calls the gradient more than once, or hides it where it cannot be found."""


class NoRepeatedBlocksError(MerakError, ValueError):
    """The model has no chain of equal blocks that could be split over pipeline stages."""


class NotSeparableError(MerakError, ValueError):
    """The loss couples the rows of the batch, so microbatches cannot give the full-batch numbers."""


class StateError(MerakError, ValueError):
    """The state passed to a step is not the one that the step was planned for."""


class EmulationError(MerakError, RuntimeError):
    """`emulate` came after the first use of a JAX device."""
