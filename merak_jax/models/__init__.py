"""Plain Flax models. They import flax and jax, and nothing of merak_jax."""
