"""`aiodist run`: starting the workers of a job, and ending them. Each module imports only earlier ones.

- `worker_agent`: the script beside each worker, which starts it and ends it.
- `starter`: the script that stands in for mpiexec where there is no MPI.
- `leftovers`: what jobs leave on this machine, and its removal.
- `switchboard`: the launcher's connections to agents on other machines.
- `following`: a job followed to its end.
- `mpi_launcher`: the mpiexec to use, and its flags.
- `gloo_launcher`: how workers are started without an MPI.
- `run`: the command.
"""
