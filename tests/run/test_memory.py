import subprocess
import sys

from aligner.run.memory import peak_rss_bytes

CHILD = "from aligner.run.memory import peak_rss_bytes; print(peak_rss_bytes())"


def test_a_program_does_not_answer_for_the_one_that_started_it():
    before = peak_rss_bytes()
    large = bytearray(b"x") * (256 << 20)
    own = peak_rss_bytes()
    assert own >= max(before, len(large))
    child = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, check=True)
    assert 1 << 20 < int(child.stdout) < 128 << 20
