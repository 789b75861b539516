"""What is imported for good is left alone by the garbage collector, and nothing else is."""

import gc
import weakref

import pytest

from aligner.loading import for_good


class Knot:
    def __init__(self):
        self.me = self


def test_only_what_is_made_within_stays(tmp_path, monkeypatch):
    (tmp_path / "never_imported.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    with for_good():
        import never_imported  # noqa: F401

        inside = weakref.ref(Knot())
        assert not gc.isenabled()
    outside = weakref.ref(Knot())
    gc.collect()
    assert gc.isenabled() and inside() is not None and outside() is None
    inside().me = None
    assert inside() is None


def test_where_everything_is_imported_nothing_stays():
    """A process that comes by once more has made garbage since."""
    before = weakref.ref(Knot())
    with for_good():
        inside = weakref.ref(Knot())
    gc.collect()
    assert before() is None and inside() is None


def test_a_failed_import_leaves_the_collector_on():
    with pytest.raises(ImportError), for_good():
        import no_such_module  # noqa: F401
    assert gc.isenabled()
