"""The command line, and traces of runs (floor 11). Each module or package imports only earlier ones.

- `usage`: exit codes, usage errors, types of arguments.
- `output`: the console, tables and reports.
- `trace`: traces of runs (`recording`, `file`), and the `trace` command (`show`).
- `agent`: the script that starts and ends each worker of a job; the processes that Linux shows.
- `launch`: the command that runs a program on several workers.
- `check`: the `check` and `explain` commands.
- `doctor`: the `doctor` command.
- `cli`: the entry point, and the `demo` command.
"""
