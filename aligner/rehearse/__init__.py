"""Any rank of a job, executed without its GPU and without the other ranks.

The job's own program runs (`build.run_stage`); what it is told is false in three places, each a file here:

    cuda.py, device.py    tensors "on cuda" have shapes and no storage; what they would hold, cost and wait for is noted
    collectives.py        process groups of the full size, of which this rank is the only member that is there
    program.py            weights, rows, answers and scores: as long and as large as the config allows

The patches stay: a process rehearses one rank and ends.
"""
