"""Orders of pipeline tasks, their lowering to tick tables, and pictures of them. Imports numpy only."""
