"""Arithmetic of the scale model, and the parsers of request counters."""

from __future__ import annotations

import math

import pytest

from benchmarks.scale_model import (
    Load,
    Window,
    count_requests,
    fit_load,
    fit_servers,
    per_checkpoint,
    per_step,
    sum_by_group,
    sum_counter,
)


def test_fit_recovers_a_load_from_two_step_durations() -> None:
    # 0.05 cores idle, 2 ms per second and run, 80 ms per step: 0.132 cores at 1 s, 0.06 cores at 10 s.
    load = fit_load(0.05, (1.0, 0.132), (10.0, 0.060))
    assert (load.idle, load.per_run, load.cpu_s) == pytest.approx((0.05, 0.002, 0.08))


def test_load_adds_up_run_by_run() -> None:
    load = Load(idle=0.05, per_run=0.002, cpu_s=0.08)
    assert load.cores(0, 10.0) == 0.05
    assert load.cores(100, 10.0) == pytest.approx(0.05 + sum(0.002 + 0.08 / 10 for _ in range(100)))


@pytest.mark.parametrize("cores", [1.0, 4.0])
def test_the_largest_number_of_runs_uses_all_cores(cores: float) -> None:
    load = Load(idle=0.05, per_run=0.002, cpu_s=0.08)
    assert load.cores(load.max_runs(10.0, cores), 10.0) == pytest.approx(cores)
    assert load.max_runs(20.0, cores) > load.max_runs(10.0, cores)


def test_runs_without_load_have_no_limit() -> None:
    assert math.isinf(Load(idle=0.01, per_run=0.0, cpu_s=0.0).max_runs(10.0))


def test_noise_never_fits_a_negative_load() -> None:
    load = fit_load(0.05, (1.0, 0.04), (10.0, 0.045))
    assert load.per_run == load.cpu_s == 0


def test_fit_rejects_equal_step_durations() -> None:
    with pytest.raises(ValueError, match="the slow steps take 1 s, the fast ones 1 s"):
        fit_load(0.0, (1.0, 0.1), (1.0, 0.1))


def test_servers_are_fitted_to_their_own_cores() -> None:
    windows = [
        Window("idle", 0, 0.0, 0, 0, {"prefect": 0.05}),
        Window("fast", 1, 1.0, 40, 0, {"prefect": 0.132, "flows": 0.3}),
        Window("1", 1, 10.0, 6, 0, {"prefect": 0.060, "flows": 0.03}),
    ]
    loads = fit_servers(windows)
    assert loads["prefect"].cpu_s == pytest.approx(0.08)
    assert loads["flows"].idle == 0
    assert loads["flows"].cores(1, 1.0) == pytest.approx(0.3)


def test_access_log_lines_are_counted_by_route() -> None:
    log = (
        'INFO:     127.0.0.1:5 - "POST /api/2.0/mlflow/runs/log-batch HTTP/1.1" 200 OK\n'
        'Logs with "GET" and / in their text are no requests.\n'
        'INFO:     127.0.0.1:5 - "POST /api/2.0/mlflow/runs/log-batch HTTP/1.1" 503 Service Unavailable\n'
        'INFO:     127.0.0.1:6 - "GET /api/flow_runs/12345678-1234-1234-1234-123456789abc HTTP/1.1" 200 OK\n'
        'INFO:     127.0.0.1:6 - "PATCH /api/logged-models/m-0123456789abcdef0123456789abcdef HTTP/1.1" 200 OK\n'
        'INFO:     127.0.0.1:6 - "PUT /artifacts/1/0123456789abcdef0123456789abcdef/a.html HTTP/1.1" 200 OK\n'
        'INFO:     127.0.0.1:7 - "WebSocket /api/events/in" [accepted]\n'
    )
    assert count_requests(log) == {
        "POST /api/2.0/mlflow/runs/log-batch": 2,
        "GET /api/flow_runs/ID": 1,
        "PATCH /api/logged-models/ID": 1,
        "PUT /artifacts/ID/ID/a.html": 1,
    }


def test_prometheus_samples_are_summed_by_label() -> None:
    metrics = (
        "# HELP s3_request_total Counter of s3 requests.\n"
        "# TYPE s3_request_total counter\n"
        's3_request_total{bucket="runs",code="200",type="GET"} 2\n'
        's3_request_total{bucket="runs",code="404",type="GET"} 3\n'
        's3_request_total{bucket="runs",code="200",type="PUT"} 1e+06\n'
        's3_request_total_bucket{type="GET"} 9\n'
        "go_goroutines 40\n"
    )
    assert sum_counter(metrics, "s3_request_total", "type") == {"GET": 5, "PUT": 1_000_000}


def test_counts_per_step_include_counters_that_appear_later() -> None:
    before = {"mlflow POST /a": 10, "s3 GET": 4}
    after = {"mlflow POST /a": 30, "s3 GET": 4, "s3 PUT": 5}
    assert per_step(before, after, 10) == {"mlflow POST /a": 2.0, "s3 PUT": 0.5}


def test_counts_per_step_need_a_step() -> None:
    with pytest.raises(ValueError, match="the window has 0 steps"):
        per_step({}, {}, 0)


def test_counts_per_checkpoint_are_the_excess_over_steps_without_checkpoints() -> None:
    with_checkpoints = {"s3 PUT": 1.4, "mlflow POST /a": 1.0}
    assert per_checkpoint(with_checkpoints, {"s3 PUT": 0.2, "mlflow POST /a": 1.0}, 5) == {"s3 PUT": pytest.approx(6.0)}


def test_groups_keep_rows_apart_and_leave_results_out() -> None:
    counts = {
        "service optim_step": 1.0,
        "service result:optim_step": 1.0,
        "service retrieve_future": 3.0,
        "prefect rows events": 21.0,
        "prefect POST /api/task_runs/ID": 2.0,
    }
    assert sum_by_group(counts) == {
        "service requests": 4.0,
        "prefect rows events": 21.0,
        "prefect requests": 2.0,
    }
