"""Layouts compared with one rank, by tiny models: `aligner check layouts`, and the tables of the tests."""
