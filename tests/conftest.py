"""Eight emulated devices and float64 for the whole suite, before anything else touches JAX."""

import jax

import merak_jax

merak_jax.emulate(8)
jax.config.update("jax_enable_x64", True)
