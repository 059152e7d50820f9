"""`aiodist run`: starting the workers of a job, and ending them. Each module imports only earlier ones.

- `agent`: the script beside each worker, which starts it and ends it; processes, as Linux shows them.
- `notes`: what agents and workers tell the launcher, what follows from it, and the shared memory that they leave.
- `job`: a job followed to its end.
- `mpiexec`: which one to use, and its flags.
- `run`: the command.
"""
