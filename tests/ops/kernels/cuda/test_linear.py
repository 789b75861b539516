"""flash-linear-attention's kernels in Triton's interpreter, as layers call them."""

from tests.megatron.te_stand_in import FOLDER
from tests.needs import lacking, package

package("triton")

from tests.ops.kernels.cuda.triton_compiled import lines_of_cases  # noqa: E402


def test_they_equal_torchs_operations():
    if not (FOLDER / "fla").is_dir():
        lacking("flash-linear-attention is not in .te-python: launchers/te_python.sh")
    lines = [line for line in lines_of_cases("linear_cases") if " torch." in line]
    assert len(lines) == 8, "\n".join(lines)
