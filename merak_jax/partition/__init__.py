"""From a loss jaxpr to blocks, stages and the dimensions that tensor parallelism splits."""
