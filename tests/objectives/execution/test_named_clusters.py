"""Terms on existing Dask and Ray clusters, which keep running."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import stubborn_terms
from ragged_batches import make_batch

from objectives import Objective, ObjectiveError

pytestmark = pytest.mark.slow

INSTALL = "the extra {0} is not installed: pip install -c constraints.txt -e '.[{0}]'"

RAY_CLUSTER = """
import sys, tempfile
import ray
with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:
    context = ray.init("local", num_cpus=2, include_dashboard=False, object_store_memory=2**28, _temp_dir=folder)
    print(context.address_info["address"], flush=True)
    sys.stdin.read()
    ray.shutdown()
"""

RAY_RUN = """
import ray, stubborn_terms
from ragged_batches import make_batch
from objectives import Objective
batch, outputs = make_batch([2])

def ask():
    with Objective(regularizers=[{"name": "test_where", "execution": "ray"}]) as objective:
        return objective.runner.evaluate(objective.regularizers[0], outputs, batch, True).metrics["pid"]

first = ask()
assert not ray.is_initialized()
assert ask() != first  # the actor of the first has ended with it
ray.init(logging_level="warning")  # a program that has its own connection keeps it
ask()
assert ray.is_initialized()
assert ray.get(ray.remote(lambda: 3).remote()) == 3
print("good")
"""


@pytest.mark.parametrize(
    ("has_nanny", "message"), [(True, "and its worker was killed"), (False, "goes on in the worker .*no nanny to kill")]
)
def test_a_configured_dask_cluster_is_used_and_kept_running(has_nanny, message):
    distributed = pytest.importorskip("distributed", reason=INSTALL.format("dask"))
    import dask.config

    batch, outputs = make_batch([2])
    entries = [{"name": f"test_{fn}", "execution": "dask"} for fn in ("where", "hangs")]
    stubborn_terms.RELEASE.clear()
    with distributed.LocalCluster(
        n_workers=1,
        threads_per_worker=1,
        processes=has_nanny,
        protocol="tcp",
        dashboard_address=None,
        host="127.0.0.1",
    ) as cluster:
        address = cluster.scheduler_address
        with dask.config.set({"scheduler-address": address}), Objective(regularizers=entries) as objective:
            where, hangs = objective.regularizers
            evaluate = objective.runner.evaluate
            pid = evaluate(where, outputs, batch, True).metrics["pid"]
            assert (pid == os.getpid()) != has_nanny
            with pytest.raises(ObjectiveError, match=message):
                evaluate(replace(hangs, timeout_s=0.5), outputs, batch, True)
            stubborn_terms.RELEASE.set()
            assert (evaluate(where, outputs, batch, True).metrics["pid"] == pid) != has_nanny
        with distributed.Client(address, set_as_default=False) as client:
            assert client.submit(sum, (1, 2)).result(60) == 3


def test_a_configured_ray_cluster_is_used_and_kept_running():
    pytest.importorskip("ray", reason=INSTALL.format("ray"))
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parents[2]), *sys.path])
    env = os.environ | {"PYTHONPATH": path, "RAY_AUTH_MODE": "disabled"}
    cluster = subprocess.Popen(
        [sys.executable, "-c", RAY_CLUSTER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
    )
    assert cluster.stdout is not None
    try:
        env["RAY_ADDRESS"] = cluster.stdout.readline().strip()
        completed = subprocess.run(
            [sys.executable, "-c", RAY_RUN], env=env, capture_output=True, text=True, timeout=240, check=False
        )
        assert completed.returncode == 0, completed.stderr
        assert completed.stdout.endswith("good\n")
        assert cluster.poll() is None
    finally:
        cluster.communicate("", timeout=60)
