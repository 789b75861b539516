"""`python -m aligner.rehearse.rank`, with every micro-batch run of the cases that are to be whole."""

import sys

from aligner.rehearse import rank, shortened


def rehearse(case, *arguments):
    if case["whole"]:
        shortened.kept = lambda kinds, stages: [(number, 0) for number in range(len(kinds))]
    begin(case, *arguments)


begin, rank.rehearse = rank.rehearse, rehearse

if __name__ == "__main__":
    rank.main(sys.argv[1])
