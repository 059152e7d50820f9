"""Several workers: processes that each run some of the replicas and agree on every collective (floor 6).

Before anything else of a step, workers exchange one small record each: equal records mean the same collective, and only
then are values moved. If records differ, every worker sends a snapshot of its ledger to worker 0, which analyses all of
them as one, and all raise the same report. Modules, in order; each imports only from those above it and from lower
floors:

- `transport`: the protocol of engines, which move bytes between workers; calls in worker threads as requests.
- `journal`: the journal of a job of `aiodist run`.
- `ending`: how this worker ends: what it tells the others, which worker shows a report, and MPI's end.
- `layout`: how each worker introduces itself, and which replicas live on which worker.
- `record`: the record that opens every step, what the records of all workers say together, and the digests in them.
- `messages`: messages between workers and the coordinator, as JSON.
- `session`: one order of steps over a communicator, as a state machine.
- `exchange`: how a collective's values move: in the record, or by a plan.
- `coordinator`: worker 0's part in trouble, as a state machine: snapshots in, one report out; groups' communicators.
- `driver`: waits for requests on the event loop; nothing else here knows about the loop.
- `team`: this worker's part in a strategy, in its runs, and in calls outside of replicas.
- `engines`: simulated (many workers in one process, or one alone), mpi, torch.
- `admission`: who may connect to worker 0: its address, the handshake.
- `control`: the control connection: messages, heartbeats, silent workers; it has a thread of its own.
- `bootstrap`: the rendezvous of a strategy's workers, and the choice of the engine.
"""
