"""Eight emulated devices and float64 for the whole suite, before anything else touches JAX; machine code compiled quickly."""

import gc

import jax
import pytest
from hypothesis import settings

import merak_jax

merak_jax.emulate(8)
jax.config.update("jax_enable_x64", True)
# Nearly all the time of the suite is XLA's, to compile. Without most optimisations of the machine code it takes two thirds;
# programs, partitioning and collectives stay what they are, and so do all bars.
jax.config.update("jax_disable_most_optimizations", True)
# Property tests draw the same examples in every run; `--hypothesis-profile=default` draws others.
settings.register_profile("reproducible", deadline=None, database=None, derandomize=True)
settings.load_profile("reproducible")


@pytest.fixture(scope="module")
def fully_optimised():
    """Compile as users do, until the end of the module."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture(scope="module", autouse=True)
def free_programs():
    """Compiled programs of one module are of no use to the next: kept, they fill gigabytes."""
    yield
    jax.clear_caches()
    gc.collect()
