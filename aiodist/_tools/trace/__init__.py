"""Traces: the timeline of runs, in a file and on a page. Each module imports only earlier ones.

- `recording`: what is recorded while runs go on.
- `writer`: a trace file, in the Trace Event format.
- `trace`: the context manager of users, and the trace of a whole process.
- `reader`: a trace file read back.
- `summary`: who waited, and for whom.
- `page`: the timeline as one page for a browser.
- `command`: the commands that show a trace.
"""
