"""Programs of torch.distributed: their ranks in one process, checked; and the dumps of their jobs (floor 10).

Only the first three can be used without torch. The modules, in order; each imports only from those above it and from
lower floors:

- `report`: reports in PyTorch's terms.
- `dumps`: what PyTorch's flight recorder has written, one file a rank, read and checked.
- `explain`: what the dumps of a job say: a snapshot, the report on it, and what they cannot show.
- `private`: torch, and the private names of it that are used.
- `ranks`: a thread a rank, of which one runs at a time, and what each has for itself of the process.
- `job`: the order check of a script's ranks, what each collective computes, and who waits for what.
- `group`: what torch has of it: process groups and stores.
- `cpu`: the CPU in place of CUDA devices.
- `script`: a script on its ranks, in a fork for each schedule, and what came of it.
"""
