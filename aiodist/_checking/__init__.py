"""Finding bugs that depend on the order of tasks: a controlled event loop, schedules, and exploring (floor 9).

Modules, in order; each imports only from those above it and from lower floors:

- `schedule`: in which order ready tasks run, as changes to asyncio's order, and the orders that look for trouble.
- `threads`: which threads could act, and which only wait for another.
- `loop`: the event loop with a chosen order and a virtual clock.
- `explore`: running a program under schedule after schedule, ending runs that cannot go on, and reducing what fails.
- `target`: the function that a person names on the command line.
- `check`: exploring a target; which collectives there were, who was waited for, and the result as text and as JSON.
"""
