"""Programs of torch.distributed: their ranks in one process, checked; and the dumps of their jobs (floor 10).

The first three work without torch. The modules, in order; each imports only from those above it and from
lower floors:

- `report`: calls and reports in PyTorch's terms.
- `dumps`: reads and checks the files of PyTorch's flight recorder, one per rank.
- `explain`: a snapshot from the dumps of a job, the report on it, and what dumps cannot show.
- `private`: torch, and the private names of torch that are used.
- `places`: where the program makes its calls, and swapped calls.
- `ranks`: a thread per rank, one of which runs at a time.
- `process`: each rank's own part of the process.
- `collectives`: what a collective on tensors asks for, and what it computes.
- `job`: what ranks have issued, who waits for what, and why a job cannot continue.
- `group`: the process groups and stores that torch sees.
- `cpu`: the CPU in place of CUDA devices.
- `script`: runs a script on its ranks, in a fork for each schedule, and returns the outcome.
"""
