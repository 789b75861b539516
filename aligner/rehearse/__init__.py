"""Any rank of a job, executed without its GPU and without the other ranks.

The job's own program runs (`builders.stage.run_stage`). Three interfaces are replaced, each in its own files:

    cuda.py, device.py    tensors "on cuda" have shapes and no storage; their bytes, operations and waits are recorded
    collectives.py        process groups of the full size, of which this rank is the only existing member
    program.py            weights, rows, responses and scores: as long and as large as the config allows

The patches stay: a process rehearses one rank and ends.
"""
