"""Replicas on an event loop (floor 5): the scheduler, contexts and handles, and what their tasks wait for.

Modules, in order; each imports only from those above it and from lower floors:

- `current`: the current context: a replica's, cross-replica, or none.
- `stacks`: where a coroutine is suspended, and a call's callers.
- `arguments`: checks of what users pass, and of what their functions return.
- `requests`: what a call asks for: its description, with the `Call` for the order check and the executors.
- `rendezvous`: a slot of the ledger, with values, waiters and the result.
- `handle`: what a collective call returns, and where a replica waits.
- `outcome`: the one error that comes out of a run.
- `loop`: asyncio and trio, as the scheduler needs them.
- `threads`: the process-wide cache of idle threads.
- `run_threads`: the threads of a run, for `run_sync` and for large results.
- `participant`: a replica in one of its groups.
- `merge`: merge functions.
- `context`: `ReplicaContext`.
- `suspension`: what one task is suspended in.
- `causes`: why a task is cancelled, and which exception it is handling.
- `inspection`: who waits for whom, and which replicas will never continue.
- `blocking`: the warning about a replica that blocks the event loop.
- `stall`: the warning about a run that makes no progress.
- `observed`: runs that a tool observes; races.
- `scheduler`: one run: completes its collectives, and reports its trouble.
- `tasks`: the tasks of its replicas: what their functions return or raise, and what the run raises.
"""
