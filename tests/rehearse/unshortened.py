"""`python -m aligner.rehearse.rank`, with every micro-batch run."""

import sys

from aligner.rehearse import rank, shortened

shortened.kept = lambda kinds, stages: [(number, 0) for number in range(len(kinds))]

if __name__ == "__main__":
    rank.main(sys.argv[1])
