"""Actors that play, learners that train: replicas of one strategy learn from what other tasks put into their queues.

    python docs/examples/actor_learner.py

Actors are ordinary tasks. Each plays a bandit with four arms by the newest policy and puts its observations into the
queue of one learner. Learners are replicas: each waits for its own queue, and all of them take the step together. A
queue is not a collective, so a slow actor only delays the step.
"""

from __future__ import annotations

import asyncio

import numpy as np

import aiodist

LEARNERS, ACTORS, STEPS, EPISODES = 2, 4, 150, 32
PAYS = np.array([0.1, 0.2, 0.8, 0.4])


class Policy:
    """The newest parameters, which actors read and learners replace."""

    def __init__(self) -> None:
        self.logits = np.zeros(len(PAYS))

    def probabilities(self) -> np.ndarray:
        odds = np.exp(self.logits - self.logits.max())
        return odds / odds.sum()


async def act(actor: int, policy: Policy, queue: asyncio.Queue[tuple[np.ndarray, np.ndarray]]) -> None:
    """Play forever; the queue is bounded, so actors do not run ahead of the policy."""
    rng = np.random.default_rng(actor)
    while True:
        arms = rng.choice(len(PAYS), size=EPISODES, p=policy.probabilities())
        await queue.put((arms, (rng.random(EPISODES) < PAYS[arms]).astype(float)))


async def learn(policy: Policy, queue: asyncio.Queue[tuple[np.ndarray, np.ndarray]]) -> float:
    """Take policy gradient steps in a replica; return the mean reward of the last one."""
    ctx = aiodist.get_replica_context()
    logits, mean = policy.logits, 0.0
    for _ in range(STEPS):
        arms, rewards = await queue.get()
        mean = await ctx.all_reduce("MEAN", float(rewards.mean()))
        advantages = rewards - mean
        chosen = np.eye(len(PAYS))[arms] - policy.probabilities()
        logits = logits + 0.5 * await ctx.all_reduce("MEAN", advantages @ chosen / EPISODES)
        await ctx.barrier()  # all have read the old policy
        policy.logits = logits
    return mean


async def main() -> None:
    policy = Policy()
    queues = [asyncio.Queue[tuple[np.ndarray, np.ndarray]](maxsize=2) for _ in range(LEARNERS)]
    strategy = aiodist.MirroredStrategy([f"CPU:{k}" for k in range(LEARNERS)])
    async with asyncio.TaskGroup() as tasks:
        actors = [tasks.create_task(act(i, policy, queues[i % LEARNERS])) for i in range(ACTORS)]
        rewards = await strategy.run(learn, args=(policy, aiodist.PerReplica(queues)))
        for actor in actors:
            actor.cancel()
    print(f"learners agree: {len(set(strategy.experimental_local_results(rewards))) == 1}")
    best = int(policy.logits.argmax())
    print(f"the policy prefers arm {best}, with probability {policy.probabilities()[best]:.2f}")


if __name__ == "__main__":
    asyncio.run(main())
