"""From a plan to one jitted SPMD program: packed state, tick loops, stages and the update."""
