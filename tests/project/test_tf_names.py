"""The page for users of tf.distribute covers all of its public names, and is right about those that aiodist has."""

from __future__ import annotations

import inspect
import re
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

import aiodist
from tests.project.paths import ROOT

pytestmark = pytest.mark.anyio

PAGE = (ROOT / "docs" / "from-tf-distribute.md").read_text(encoding="utf-8")

# From TensorFlow's lists of its public names: v2, and what v1 has besides.
NAMES = {
    "tf.distribute": """
        CrossDeviceOps DistributedDataset DistributedIterator DistributedValues HierarchicalCopyAllReduce InputContext
        InputOptions InputReplicationMode MirroredStrategy MultiWorkerMirroredStrategy NcclAllReduce OneDeviceStrategy
        ParameterServerStrategy ReduceOp ReductionToOneDevice ReplicaContext RunOptions Server Strategy
        StrategyExtended TPUStrategy cluster_resolver coordinator experimental_set_strategy get_loss_reduction
        get_replica_context get_strategy has_strategy in_cross_replica_context
    """,
    "tf.distribute.experimental": """
        CentralStorageStrategy CollectiveCommunication CollectiveHints CommunicationImplementation
        CommunicationOptions PreemptionCheckpointHandler PreemptionWatcher TerminationConfig ValueContext partitioners
        rpc
    """,
    "Strategy": """
        cluster_resolver colocate_vars_with configure distribute_datasets_from_function experimental_distribute_dataset
        experimental_distribute_datasets_from_function experimental_distribute_values_from_function
        experimental_local_results experimental_make_numpy_dataset experimental_run experimental_run_v2 extended gather
        group make_dataset_iterator make_input_fn_iterator num_replicas_in_sync reduce run scope unwrap
        update_config_proto
    """,
    "StrategyExtended": """
        batch_reduce_to broadcast_to call_for_each_replica colocate_vars_with experimental_between_graph
        experimental_require_static_shapes experimental_run_steps_on_iterator experimental_should_init non_slot_devices
        parameter_devices read_var reduce_to should_checkpoint should_save_summary update update_non_slot
        value_container variable_created_in_scope worker_devices
    """,
    "ReplicaContext": "all_gather all_reduce devices merge_call num_replicas_in_sync replica_id_in_sync_group strategy",
    "iterators": "element_spec get_next get_next_as_optional initialize initializer",
    "tf": "IndexedSlices Variable VariableAggregation VariableSynchronization",
}
METHODS = {cls.__name__: cls for cls in (aiodist.Strategy, aiodist.StrategyExtended, aiodist.ReplicaContext)}
NOT_HERE = {
    "make_dataset_iterator", "make_input_fn_iterator", "experimental_between_graph", "non_slot_devices", "read_var",
    "experimental_require_static_shapes", "experimental_run_steps_on_iterator", "experimental_should_init",
    "should_checkpoint", "should_save_summary", "update_non_slot",
}  # fmt: skip


@pytest.mark.parametrize("where", NAMES)
def test_page_has_every_name(where: str) -> None:
    assert [name for name in NAMES[where].split() if not re.search(rf"\b{name}\b", PAGE)] == []


@pytest.mark.parametrize("where", METHODS)
def test_class_has_all_methods_but_those_that_the_page_excludes(where: str) -> None:
    assert [name for name in NAMES[where].split() if not hasattr(METHODS[where], name) and name not in NOT_HERE] == []


# Where aiodist differs on purpose.

TABLE = PAGE.partition("differs on purpose")[2].partition("\n## ")[0]
DIFFERENCES = re.findall(r"^\| `(.+?)` \| .*? \| `(\w+)` \| .* \|$", TABLE, re.MULTILINE)


class Rows(list[Any]):
    """A user's own list."""


async def value_of(code: str) -> Any:
    strategy = aiodist.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        v = aiodist.Variable(0.0)

    names: dict[str, Any] = {
        "strategy": strategy, "v": v, "x": aiodist.PerReplica([np.ones(1), np.zeros(1)]), "Rows": Rows,
        "MappingProxyType": MappingProxyType, "PerReplica": aiodist.PerReplica, "replica": aiodist.get_replica_context,
    }  # fmt: skip
    found = eval(code, names)  # the page's own code
    return await found if inspect.iscoroutine(found) else found


@pytest.mark.parametrize(("code", "outcome"), DIFFERENCES)
async def test_differences_are_as_the_page_says(code: str, outcome: str) -> None:
    try:
        found = await value_of(code)
    except Exception as error:  # noqa: BLE001  (the page names it)
        found = error
    assert type(found).__name__ == outcome


def test_all_differences_are_tried() -> None:
    assert len(DIFFERENCES) == TABLE.count("\n| `") >= 5
