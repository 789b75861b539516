import pytest

from tests.megatron import te_stand_in
from tests.needs import lacking
from tests.ranks import Ranks


@pytest.fixture(scope="package")
def te_ranks():
    """Ranks with TransformerEngine's Python, for all tests of this folder."""
    if not te_stand_in.is_there():
        lacking("TransformerEngine's Python is not in .te-python: launchers/te_python.sh")
    pool = Ranks(first=te_stand_in.__name__)
    yield pool
    pool.close()
