"""From parameters to blocks and groups: which shape, which pieces, which structure."""

import warnings

import pytest
import torch
from torch import nn

from llqr import Metric
from llqr.metric.layout import blocks_of, layer_of
from small_models import Attention, ViT, mlp, translator


class Table(nn.Module):
    """Parameters that belong to no layer."""

    def __init__(self):
        super().__init__()
        self.positions = nn.Parameter(torch.randn(1, 7, 4))
        self.token = nn.Parameter(torch.randn(1, 1, 4))
        self.temperature = nn.Parameter(torch.tensor(2.0))
        self.scale = nn.Parameter(torch.randn(4))
        self.volume = nn.Parameter(torch.randn(2, 3, 4))


def shapes(model):
    return {b.name: b.shape for b in blocks_of(model, dict(model.named_parameters()))}


@pytest.mark.parametrize(
    ("model", "weight"),
    [
        (nn.Linear(5, 3), (3, 5)),
        (nn.Conv1d(4, 6, 5), (6, 20)),
        (nn.Conv2d(4, 6, (3, 2)), (6, 24)),
        (nn.Conv3d(2, 3, 2), (3, 16)),
        (nn.Conv2d(4, 4, 3, groups=4), (4, 9)),
        (nn.Conv2d(4, 1, 3), (1, 36)),
        (nn.ConvTranspose2d(4, 6, 3), (4, 54)),
        (nn.Embedding(11, 4), (11, 4)),
        (nn.BatchNorm2d(5), (5,)),
        (nn.LayerNorm(5), (5,)),
        (nn.Bilinear(2, 3, 4), (4, 6)),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_weights_as_matrices(model, weight):
    assert shapes(model)["weight"] == weight
    if getattr(model, "bias", None) is not None:
        assert shapes(model)["bias"] == tuple(model.bias.shape)


def test_tables_tokens_and_numbers():
    assert shapes(Table()) == {
        "positions": (7, 4),
        "token": (1, 4),
        "temperature": (1,),
        "scale": (4,),
        "volume": (2, 12),
    }


@pytest.mark.parametrize("owner", [nn.MultiheadAttention(4, 2), Attention(4, 2, fused=True)], ids=["torch", "qkv"])
def test_fused_projections_are_three_blocks(owner):
    found = {b.name: b for b in blocks_of(owner, dict(owner.named_parameters()))}
    weight, bias = ("in_proj_weight", "in_proj_bias") if hasattr(owner, "in_proj_bias") else ("qkv.weight", "qkv.bias")
    for i, part in enumerate("qkv"):
        assert found[f"{weight}[{part}]"].shape == (4, 4)
        assert found[f"{bias}[{part}]"].shape == (4,)
        assert found[f"{weight}[{part}]"].rows == found[f"{bias}[{part}]"].rows == (4 * i, 4 * i + 4)
        assert found[f"{weight}[{part}]"].layer == found[f"{bias}[{part}]"].layer
    assert len({b.layer for b in found.values()}) == 4
    assert not {weight, bias} & set(found)


def test_a_parameter_called_qkv_is_fused_and_others_are_not():
    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Parameter(torch.randn(6, 2))
            self.qkv_like = nn.Parameter(torch.randn(6, 2))

    assert shapes(Bare()) == {"qkv[q]": (2, 2), "qkv[k]": (2, 2), "qkv[v]": (2, 2), "qkv_like": (6, 2)}
    odd = nn.Sequential()
    odd.add_module("qkv", nn.Linear(2, 4))
    assert shapes(odd) == {"qkv.weight": (4, 2), "qkv.bias": (4,)}


def test_attention_with_different_widths_keeps_its_three_weights():
    attention = nn.MultiheadAttention(4, 2, kdim=3, vdim=5)
    found = shapes(attention)
    assert found["k_proj_weight"] == (4, 3)
    assert found["v_proj_weight"] == (4, 5)
    assert found["in_proj_bias[k]"] == (4,)


def test_layers_join_weight_and_bias():
    assert layer_of("a.b.weight") == layer_of("a.b.bias") == "a.b"
    assert layer_of("weight") == layer_of("bias") == ""
    assert layer_of("positions") == "positions"
    assert layer_of("a.scale") == "a.scale"


def test_tied_parameters_are_one_block():
    names = list(shapes(translator()))
    assert "embedding.weight" in names
    assert "output.weight" not in names


# -- which structure ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", ["kfac", "kfac-psd", "e-kfac", "e-kfac-psd", "e-kfac-one-sided", "e-kfac-channels", "diag-kfac"]
)
def test_vectors_get_a_diagonal_beside_a_structure_of_matrices(kind):
    metric = Metric(mlp(), structure=kind)
    assert metric.kinds == {"0.weight": kind, "0.bias": "diagonal", "2.weight": kind, "2.bias": "diagonal"}


@pytest.mark.parametrize("kind", ["scalar", "dense", "diagonal", "identity"])
def test_vectors_take_a_structure_that_fits_them(kind):
    assert set(Metric(mlp(), structure=kind).kinds.values()) == {kind}


def test_the_first_pattern_that_matches_wins():
    metric = Metric(mlp(), structure={"0.bias": "identity", "0.*": "scalar", "*.weight": "kfac", "*": "diagonal"})
    assert metric.kinds == {"0.weight": "scalar", "0.bias": "identity", "2.weight": "kfac", "2.bias": "diagonal"}
    turned = Metric(mlp(), structure={"0.*": "scalar", "0.bias": "identity", "*": "diagonal"})
    assert turned.kinds["0.bias"] == "scalar"


def test_patterns_name_parameters_as_written_also_in_compiled_parts():
    model = mlp()
    model[0] = torch.compile(model[0])
    rules = {"0.bias": "identity", "0.weight": "scalar", "*": "diagonal"}
    kinds = Metric(model, structure=rules).kinds
    assert {name.replace("_orig_mod.", ""): kind for name, kind in kinds.items()} == Metric(
        mlp(), structure=rules
    ).kinds
    assert set(Metric(model, structure={"0._orig_mod.*": "kfac", "*": "scalar"}).kinds.values()) == {
        "kfac",
        "scalar",
        "diagonal",
    }


@pytest.mark.parametrize(
    ("structure", "message"),
    [
        ("k-fac", "structure: unknown structure 'k-fac' for '\\*'; choose one of .*e-kfac.*identity.*kfac"),
        ({"*": "foo"}, "structure: unknown structure 'foo'"),
        ({"head.*": "diagonal", "*": "kfac"}, "structure: the pattern 'head.\\*' matches no parameter"),
        ({"*.weight": "kfac"}, "structure: no pattern matches parameter '0.bias'; add a '\\*' rule"),
        ({}, "structure: no pattern matches parameter '0.weight'"),
    ],
)
def test_bad_rules_are_named(structure, message):
    with pytest.raises(ValueError, match=message):
        Metric(mlp(), structure=structure)


@pytest.mark.parametrize(
    ("kind", "cheaper"),
    [("kfac", "diag-kfac"), ("e-kfac", "e-kfac-one-sided"), ("kfac-psd", "diag-kfac"), ("dense", "diagonal")],
)
def test_large_blocks_fall_back_and_say_so(kind, cheaper):
    with pytest.warns(UserWarning, match=rf"max_side=5: {kind} -> {cheaper} for 0.weight \(6, 4\)") as caught:
        metric = Metric(mlp(), structure=kind, max_side=5)
    assert len(caught) == 1
    assert metric.kinds["0.weight"] == cheaper
    # A side of exactly the limit still fits; the side of a dense vector is its length.
    assert metric.kinds["0.bias"] == "diagonal"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Metric(mlp(), structure=kind, max_side=24).kinds["0.weight"] == kind


def test_the_limit_counts_sides_and_for_dense_entries():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Metric(mlp(), structure="kfac", max_side=6)
        Metric(mlp(), structure="diag-kfac", max_side=1)
    with pytest.warns(UserWarning, match="dense -> diagonal"):
        Metric(mlp(), structure="dense", max_side=23)


def test_the_limit_counts_only_the_shorter_side_where_only_that_is_rotated():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Metric(mlp(), structure="e-kfac-one-sided", max_side=4).kinds["0.weight"] == "e-kfac-one-sided"
    with pytest.warns(UserWarning, match=r"e-kfac-one-sided -> diag-kfac for 0.weight \(6, 4\)"):
        assert Metric(mlp(), structure="e-kfac-one-sided", max_side=3).kinds["0.weight"] == "diag-kfac"
    with pytest.warns(UserWarning, match=r"max_side=3: e-kfac -> diag-kfac for 0.weight \(6, 4\)"):
        assert Metric(mlp(), structure="e-kfac", max_side=3).kinds["0.weight"] == "diag-kfac"


def test_the_limit_counts_channels_where_kernel_positions_share_a_basis():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Metric(nn.Conv2d(4, 6, 3), structure="e-kfac-channels", max_side=6).kinds["weight"] == "e-kfac-channels"
    with pytest.warns(UserWarning, match=r"e-kfac-channels -> diag-kfac for weight \(6, 36\)"):
        Metric(nn.Conv2d(4, 6, 3), structure="e-kfac-channels", max_side=5)


# -- groups ------------------------------------------------------------------------------------------------------------


def test_blocks_of_one_shape_are_stacked():
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)), nn.Linear(4, 2))
    metric = Metric(model, structure="kfac")
    assert [(g.name, [b.name for b in g.blocks]) for g in metric.groups] == [
        ("kfac", ["0.weight", "1.weight", "2.weight"]),
        ("diagonal", ["0.bias", "1.bias", "2.bias", "3.bias"]),
        ("kfac", ["3.weight"]),
    ]
    assert metric.factors()[0]["out"].shape == (3, 4, 4)


def test_fused_projections_stack_with_what_has_their_shape():
    metric = Metric(ViT(fused=True), structure="e-kfac")
    stacked = next(g for g in metric.groups if any(b.name == "attention.qkv.weight[q]" for b in g.blocks))
    assert [b.name for b in stacked.blocks] == [
        "patches.weight",
        "attention.qkv.weight[q]",
        "attention.qkv.weight[k]",
        "attention.qkv.weight[v]",
        "attention.proj.weight",
    ]


@pytest.mark.parametrize(("kind", "groups"), [("e-kfac", 1), ("e-kfac-channels", 3)])
def test_kernels_of_different_sizes_are_apart_where_the_structure_needs_it(kind, groups):
    """All three are matrices (4, 36), of 9, 4 and 1 kernel positions."""
    model = nn.ModuleList([nn.Conv2d(4, 4, 3), nn.Conv2d(9, 4, 2), nn.Linear(36, 4)])
    stacks = [group for group in Metric(model, structure=kind).groups if group.name == kind]
    assert len(stacks) == groups
    if groups == 3:
        assert [group.shapes()["in"] for group in stacks] == [(1, 4, 4), (1, 9, 9), (1, 36, 36)]


@pytest.mark.parametrize(
    ("model", "positions"),
    [
        (nn.Linear(5, 3), 1),
        (nn.Conv1d(4, 6, 5), 5),
        (nn.Conv2d(4, 6, (3, 2)), 6),
        (nn.Conv2d(4, 4, 3, groups=4), 9),
        (nn.ConvTranspose2d(4, 6, 3), 9),
        (nn.Bilinear(2, 3, 4), 1),
        (nn.Embedding(11, 4), 1),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_kernel_positions(model, positions):
    found = {b.name: b.kernel_positions for b in blocks_of(model, dict(model.named_parameters()))}
    assert found["weight"] == positions
    assert found.get("bias", 1) == 1


def test_mixed_dtypes_that_share_a_factor_dtype_share_a_group():
    model = nn.Sequential(nn.Linear(4, 4).bfloat16(), nn.Linear(4, 4), nn.Linear(4, 4).double())
    metric = Metric(model, structure="scalar")
    assert sorted(len(g.layers) for g in metric.groups) == [1, 2]
    assert set(metric.named_factors()) == {"0", "1", "2"}


def test_planning_needs_no_memory():
    with torch.device("meta"):
        model = nn.Linear(4096, 4096)
    metric = Metric(model, structure="e-kfac")
    assert metric.stored() == 3 * 4096**2 + 4096
    assert metric.memory() == {
        "e-kfac": 4 * 3 * 4096**2,
        "diagonal": 4 * 4096,
        "total": 4 * (3 * 4096**2 + 4096),
        "allocated": 0,
    }


@pytest.mark.parametrize(
    ("structure", "units"),
    [("diagonal", [["weight", "bias"]]), ("e-kfac", [["weight"], ["bias"]]), ("kfac", [["weight"], ["bias"]])],
)
def test_scale_and_bias_of_a_norm_are_one_clip_unit_only_if_all_of_u_is_diagonal(structure, units):
    metric = Metric(nn.BatchNorm1d(64), structure=structure)
    (group,) = metric.groups
    found = [[block.name for block in group.blocks if block.layer == layer] for layer in group.layers]
    assert found == units
    slopes = {"diagonal": torch.arange(1.0, 129.0)}
    clipped = group.clipped(slopes, 1.0)
    assert group.norms(clipped["diagonal"]).tolist() == pytest.approx([1.0] * len(units))
