"""The command line, and the traces that it shows. Each module or package imports only earlier ones.

- `usage`: exit codes, bad usage, types of arguments.
- `output`: what commands print.
- `trace`: traces of runs, and the command that shows them.
- `agent`: the script beside each worker of a job, which starts it and ends it; processes, as Linux shows them.
- `launch`: the command that runs a program on several workers.
- `check`: the commands that run a program under many schedules, and read the dumps of a torch.distributed job.
- `doctor`: the command that says what is missing on this machine.
- `cli`: all commands, how they end, and the command that runs the demos.
"""
