"""The command line, and the traces that it shows. Each module or package imports only earlier ones.

- `usage`: exit codes, bad usage, types of arguments.
- `output`: what commands print.
- `trace`: traces of runs, and the command that shows them.
- `agent`: the script that starts and ends each worker of a job; the processes that Linux shows.
- `launch`: the command that runs a program on several workers.
- `check`: the commands that run a program under many schedules, and read the dumps of a torch.distributed job.
- `doctor`: the command that shows what is missing on this machine.
- `cli`: all commands, their exit codes, and the command that runs the demos.
"""
