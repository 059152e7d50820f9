"""Finding bugs that depend on the order of tasks: a controlled event loop, schedules, and exploring (floor 9).

Modules, in order; each imports only from those above it and from lower floors:

- `schedule`: in which order ready tasks run, as changes to asyncio's order, and the orders that look for trouble.
- `threads`: which threads could act, and which only wait for another.
- `loop`: the event loop with a chosen order and a virtual clock.
- `deadlock`: what is raised when nothing can run any more, or a run takes too long, and the report on it.
- `explore`: running a program under schedule after schedule, and reducing one that fails.
- `target`: the function that a person names on the command line.
- `statistics`: which collectives there were, how many bytes they carried, and who was waited for.
- `check`: exploring a target, and noting what holds up the event loop.
- `text`: the result of a check, as text and as JSON.
"""
