"""`aiodist run`: starting the workers of a job, and ending them. Each module imports only earlier ones.

- `agent`: the script beside each worker, which starts it and ends it; processes, as Linux shows them.
- `run`: the command: which mpiexec, and a job, followed to its end.
"""
