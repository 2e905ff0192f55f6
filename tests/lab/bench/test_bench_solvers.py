"""The objective against the number of products."""

import json

import pytest
import torch

import llqr
from llqr.lab.bench import solvers
from llqr.lab.bench.measured_refresh import MeasuredRefresh, RefreshSettings
from llqr.lab.bench.workload import Network, Setup
from tiny_workloads import FP32, MLP, workload

PRODUCTS = 12


def measured(structure):
    settings = RefreshSettings(structure, runtime=llqr.Runtime(engine="forward"))
    return list(solvers.measure(Setup([Network.parse(MLP)], 4, FP32), [settings], PRODUCTS))


def curve(work, inner):
    settings = RefreshSettings("diagonal", runtime=llqr.Runtime(engine="forward"))
    with MeasuredRefresh(work, settings).quadratic_model() as model:
        return solvers.curve(llqr.Metric(work.model, structure="diagonal"), model, inner, PRODUCTS)


def refreshed(work, **inner):
    geometry = llqr.Geometry(
        work.model, torch.nn.functional.cross_entropy, structure="diagonal", inner=llqr.Inner(**inner)
    )
    return geometry.refresh(work.batch)


def test_the_heavy_ball_reaches_its_own_objective_with_its_last_product():
    rows = measured("diagonal")
    found = {row["solver"]: row for row in rows}
    assert list(found) == ["heavy-ball", *(name for name in found if name != "heavy-ball")]
    assert list(found["heavy-ball"]["objective"]) == list(range(13))
    assert found["heavy-ball"]["products_to_target"] == 12
    assert found["cg"]["products_to_target"] < 12
    assert found["cg"]["objective"][3] < found["heavy-ball"]["objective"][12]
    shown, kept = solvers.as_table(rows), solvers.as_table(json.loads(json.dumps(rows)))
    assert "J, 8" in [column.header for column in shown.columns]
    assert [list(column.cells) for column in kept.columns] == [list(column.cells) for column in shown.columns]


@pytest.mark.parametrize("solver", llqr.SOLVERS)
def test_the_curve_is_what_a_refresh_of_so_many_products_reaches(solver):
    work = workload(MLP)
    objectives = curve(work, llqr.Inner(solver))
    for products in (1, 2, 7, 12):
        report = refreshed(work, steps=products, solver=solver)
        assert objectives[0] == pytest.approx(report.objective_before, rel=1e-6)
        assert objectives[products] == pytest.approx(report.objective_after, rel=1e-6)


def test_steps_without_a_product_cost_nothing():
    """Products 0 and 1 begin steps 0 and 1, product 2 step 5, product 3 step 10."""
    work, every = workload(MLP), 5
    objectives = curve(work, llqr.Inner(product_every=every))
    assert list(objectives) == list(range(13))
    report = refreshed(work, steps=2 * every, product_every=every)
    assert objectives[3] == pytest.approx(report.objective_after, rel=1e-6)


def test_a_solver_that_refuses_the_structure_says_so():
    rows = {row["solver"]: row for row in measured("e-kfac")}
    assert rows["cg"]["refused"].startswith("solver: 'cg'")
    table = solvers.as_table(list(rows.values()))
    assert rows["cg"]["refused"] in table.caption
    assert table.row_count == len(rows)
