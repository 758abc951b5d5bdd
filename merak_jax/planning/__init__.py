"""Choose a mesh, a schedule and a memory policy before anything compiles. Touches no device."""
