"""Finding bugs that depend on the order of tasks: a controlled event loop, schedules, and exploring (floor 9).

Modules, in order; each imports only from those above it and from lower floors:

- `schedule`: the order of ready tasks, as changes to asyncio's order, and the orders that search for failures.
- `threads`: which threads may still act, and which only wait for others.
- `loop`: the event loop with a chosen order and a virtual clock, and the watch over steps that hold it up.
- `explore`: runs a program under many schedules, ends runs that cannot continue, minimises failing schedules, and says
  what their changes do.
- `target`: the function that a person names on the command line.
- `check`: explores a target; its collectives, who was waited for, and the result as text and as JSON.
"""
