"""How `build` makes what a stage needs; with it, the only place that picks concrete classes."""
