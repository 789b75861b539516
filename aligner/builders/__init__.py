"""Construction of what a stage needs; with `build`, the only place that picks concrete classes."""
