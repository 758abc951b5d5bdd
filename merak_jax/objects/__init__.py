"""nnx objects: a step that mutates its arguments becomes a pure step over their values, and the results are written back."""
