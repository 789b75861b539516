"""The version of this package: setup.py and `aligner --version` read it here."""

VERSION = "0.3.0"
