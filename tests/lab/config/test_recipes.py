"""Recipes: the paper's protocol row by row, strict reading, variants and overrides."""

import dataclasses
import json

import pytest
import torch

import llqr
from llqr.lab import data
from llqr.lab.config import recipe
from llqr.lab.config.run import Run
from llqr.lab.config.settings import Base, GeometrySettings, LrSchedule, OptimizerSettings, Probe
from llqr.lab.config.strict import ConfigurationError
from llqr.lab.runs.json_files import flatten, plain
from llqr.lab.tasks.translation import ASSUMED_VOCABULARY
from llqr.lab.text.prepared import ParallelText
from tiny_text import reversal

NETWORKS = ("vgg16-bn", "resnet18", "wrn28-10", "pyramidnet110")
STANDARD = ("sgdm", "llqr-ngd", "llqr-newton", "sam", "fishersam", "llqr-ngd+sam", "llqr-newton+sam")
TINY = tuple(method for method in STANDARD if method != "fishersam")
SYNERGY = ("sam", "fsam", "llqr-ngd+sam", "llqr-ngd+fsam")
NOISE = ("sgdm", "adam", "llqr-ngd", "sam", "llqr-ngd+sam")
IMAGENET = ("sgdm", "llqr-ngd", "llqr-newton", "fsam", "llqr-ngd+fsam", "llqr-newton+fsam")
# The vision tables of the paper: row -> columns and number of seeds.
TABLES = {
    **{f"{name}/{network}": (STANDARD, 5) for name in ("cifar10", "cifar100") for network in NETWORKS},
    **{f"tinyimagenet/{network}": (TINY, 3) for network in ("resnet18", "wrn28-10")},
    **{f"fsam-synergy/{name}/{network}": (SYNERGY, 5) for name in ("cifar10", "cifar100") for network in NETWORKS},
    "imagenet/resnet50": (IMAGENET, 3),
    "fishersam-ablation/cifar100/resnet18": (("fishersam", "llqr-ngd-probe-only+sam", "llqr-ngd+sam"), 5),
    **{f"label-noise/{rate}": (NOISE, 3) for rate in (0.2, 0.6, 0.7, 0.8)},
}


OURS = {
    "digits/mlp",
    "digits/mlp-clean",
    "digits/mlp-noisy",
    "iwslt14/europarl-de-en",
    "metric-ablation/resnet18",
    "price/resnet18",
}
TRANSLATION = "iwslt14/transformer_iwslt_de_en"


def test_every_row_of_the_paper_has_its_recipe():
    assert set(recipe.names()) == {*TABLES, TRANSLATION, *OURS}


def test_a_method_of_the_ablation_changes_one_setting_of_the_recipe():
    loaded = recipe.load("metric-ablation/resnet18")
    standard = {name: dict(flatten(plain(dataclasses.asdict(loaded.run(name))))) for name in loaded.columns}
    for name, own in standard.items():
        if name.endswith("+sam") and name != "llqr-newton+sam":
            reference = standard["llqr-ngd+sam"]
            differing = {key for key in {*own, *reference} if own.get(key) != reference.get(key)} - {"method"}
            assert len(differing) == (name != "llqr-ngd+sam"), (name, differing)


def test_a_component_takes_what_it_does_not_say_from_the_one_it_is_like(tmp_path):
    own = tmp_path / "own.toml"
    own.write_text(
        'extends = "cifar100/resnet18"\n[geometries]\n'
        'often = { like = "ngd", every = 100 }\nquick = { like = "often", inner.steps = 5 }\n'
        '[methods]\nquick = { base = "sgdm", geometry = "quick" }\n'
    )
    ngd = recipe.load("cifar100/resnet18", ["geometries.ngd.ema=0.5"]).geometries["ngd"]
    quick = recipe.load(own, ["geometries.ngd.ema=0.5"]).run("quick").geometry
    assert quick == dataclasses.replace(ngd, every=100, inner=dataclasses.replace(ngd.inner, steps=5))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("probes.x.like=sma", "probes.x.like must be one of sam, .*did you mean sam"),
        ("probes.x.like=[1]", r"probes.x.like must be one of sam, .*got \[1\]"),
        ("probes.sam.like=sam", "probes.sam.like must be one of .*, got 'sam'"),
        ("geometries.ngd.like=newton", "geometries.newton.like must be one of .*, got 'ngd'"),
    ],
)
def test_a_component_is_like_another_one(override, message):
    with pytest.raises(ConfigurationError, match=message):
        recipe.load("cifar100/resnet18", ["geometries.newton.like=ngd", override])


def test_the_translation_row_is_fairseqs_recipe_with_the_papers_additions():
    loaded = recipe.load(TRANSLATION)
    assert (loaded.columns, loaded.seeds) == (("adamw", "llqr-ngd", "sam", "llqr-ngd+sam"), 5)
    assert loaded.schedule == LrSchedule("inverse-sqrt", warmup_steps=4000)
    options = loaded.run("adamw").task_options
    assert (options.label_smoothing, options.beam, options.length_penalty, options.max_length) == (
        0.1,
        5,
        1.0,
        (1.2, 10),
    )
    assert (loaded.training.batch_size, loaded.data.name) == (4096, "iwslt14")
    run = loaded.run("llqr-ngd+sam")
    assert run.base == Base("adamw", lr=5e-4, weight_decay=1e-4, betas=(0.9, 0.98))
    assert run.probe == Probe("sam", rho=0.005, norm="metric", start_after=4000)
    assert run.geometry == GeometrySettings(
        divergence="ngd",
        structure="e-kfac",
        every=500,
        ema=0.925,
        inner=llqr.Inner(lr=1e-3, steps=50),
        batch_size=128,
    )
    with torch.device("meta"):
        model = run.build_model()
    assert (len(model.encoder), len(model.decoder)) == (6, 6)
    tables = [parameter for parameter in model.parameters() if parameter.shape == (ASSUMED_VOCABULARY, 512)]
    assert len(tables) == 2  # the source's embedding, and one matrix for the target's and the outputs


def test_the_other_corpus_differs_in_corpus_and_budget_and_says_so():
    ours, papers = recipe.load("iwslt14/europarl-de-en"), recipe.load(TRANSLATION)
    assert ours.beside == "transformer_iwslt_de_en"
    assert "another corpus" in ours.caveat
    for method in papers.methods:
        theirs = dataclasses.replace(papers.run(method), data=ours.data, training=ours.training)
        assert ours.run(method) == theirs


def test_the_last_of_two_lengths_counts():
    by_epochs = recipe.load(TRANSLATION, ["training.epochs=3"])
    assert (by_epochs.training.epochs, by_epochs.training.steps) == (3, None)
    by_steps = recipe.load("cifar10/resnet18", ["training.steps=7"])
    assert (by_steps.training.epochs, by_steps.training.steps) == (None, 7)
    assert recipe.load(TRANSLATION, ["training.epochs=3", "training.steps=5"]).training.steps == 5


def test_sizes_are_those_of_the_prepared_text_where_there_is_one(tmp_path):
    reversal(tmp_path)
    overrides = [f'data.root="{tmp_path}"', "data.name=reversal"]
    run = recipe.load(f"{TRANSLATION}@tiny", overrides).run("adamw")
    assert run.build_model().head.out_features == ParallelText.load(tmp_path / "reversal").subwords.size
    assert not run.task_type.remark(run)
    missing = dataclasses.replace(run, data=dataclasses.replace(run.data, name="nothing"))
    assert "not prepared yet" in missing.task_type.remark(missing)


@pytest.mark.parametrize("name", TABLES)
def test_rows_have_the_papers_columns_and_protocol(name):
    loaded = recipe.load(name)
    columns, seeds = TABLES[name]
    assert set(loaded.columns) == set(columns)
    assert loaded.seeds == seeds
    assert loaded.task.name == "classification"
    assert (loaded.training.epochs, loaded.training.batch_size) == (200, 128)
    assert loaded.schedule == LrSchedule("cosine")
    imagenet = name.startswith("imagenet")
    assert loaded.run(columns[0]).task_options.label_smoothing == (0.1 if imagenet else 0.0)
    for method in loaded.columns:
        run = loaded.run(method)
        assert run.base.weight_decay in (1e-4, 5e-4, 1e-3)
        if method != "adam":
            assert (run.base.name, run.base.lr, run.base.momentum, run.base.nesterov) == ("sgd", 0.05, 0.9, False)
        assert (run.geometry is not None) == method.startswith("llqr")
        assert run.transport == ("probe-only" not in method)
        if run.geometry is not None:
            divergence = "newton" if "newton" in method else "ngd"
            cheap = loaded.data.name == "cifar100" and divergence == "ngd"
            assert run.geometry == GeometrySettings(
                divergence=divergence,
                structure="e-kfac",
                every=1500 if imagenet else 500,
                ema=0.9 if divergence == "newton" else 0.95,
                inner=llqr.Inner(lr=1e-3, steps=50, product_every=3 if cheap else 1),
                runtime=llqr.Runtime(apply_dtype=torch.bfloat16, max_side=2304) if cheap else llqr.Runtime(),
                batch_size=128,
            )
        if run.probe is not None:
            assert method.split("+")[-1] == run.probe.kind
            if run.probe.kind == "fishersam":
                assert (run.probe.rho, run.probe.eta) == (0.1, 0.1)
            else:
                assert run.probe.rho == (0.075 if imagenet else 0.1 if loaded.data.name == "cifar10" else 0.2)
                assert run.probe == loaded.probes[run.probe.kind]  # one radius for SAM and for LLQR+SAM
                assert run.probe.norm == "metric"
            if run.probe.kind == "fsam":
                wide = loaded.model.name in ("wrn28-10", "pyramidnet110")
                assert run.probe.lam == (0.95 if imagenet else 0.9 if wide else 0.6)


@pytest.mark.parametrize("name", TABLES)
def test_rows_train_the_network_and_the_data_they_are_named_after(name):
    loaded = recipe.load(name)
    table, _, row = name.partition("/")
    if table == "label-noise":
        assert (loaded.data.name, loaded.model.name) == ("cifar100", "resnet18")
        assert loaded.run("sgdm").data_options.label_noise == float(row)
        return
    expected_data, _, expected_model = (row if "/" in row else name).partition("/")
    assert (loaded.data.name, loaded.model.name) == (expected_data, expected_model)
    if expected_data != "imagenet":
        options = loaded.run("sam").data_options
        assert (options.crop_padding, options.flip, options.cutout, options.label_noise) == (4, True, 16, 0.0)


def test_short_variants_differ_in_their_epochs_alone():
    for name in TABLES:
        long, short = recipe.load(name), recipe.load(f"{name}@short")
        assert short.training.epochs == 30
        assert dataclasses.replace(short, training=long.training) == long


@pytest.mark.parametrize("structure", ["kfac", "diagonal"])
@pytest.mark.parametrize("name", [*TABLES, "digits/mlp"])
def test_the_other_structures_that_the_paper_names_are_variants(name, structure):
    ours, other = recipe.load(name), recipe.load(f"{name}@{structure}")
    for method in ours.methods:
        own, theirs = ours.run(method), other.run(method)
        if own.geometry is not None:
            # A diagonal needs nothing that saves time.
            geometry = ours.geometries[own.geometry.divergence] if structure == "diagonal" else own.geometry
            own = dataclasses.replace(own, geometry=dataclasses.replace(geometry, structure=structure))
        assert own == theirs


@pytest.mark.parametrize("name", [name for name in TABLES if not name.startswith("imagenet")])
def test_the_authors_public_code_on_cifar(name):
    ours, authors = recipe.load(name), recipe.load(f"{name}@authors")
    assert authors.run("llqr-ngd+sam").geometry == dataclasses.replace(
        ours.geometries["ngd"], structure="diagonal", every=1000
    )
    assert authors.run("llqr-ngd+sam").probe == authors.run("sam").probe
    assert authors.run("sam").probe == Probe("sam", rho=0.1, norm="euclidean")
    assert authors.run("fsam").probe == Probe("fsam", rho=0.1, lam=0.6, norm="euclidean")
    assert authors.run("sam").base == dataclasses.replace(ours.run("sam").base, weight_decay=5e-4)
    assert authors.run("adam").base == Base("adamw", lr=3e-3, weight_decay=1e-2)
    assert authors.optimizer == OptimizerSettings(same_dropout=False, buffers="probe")
    assert authors.training == dataclasses.replace(ours.training, evaluate_every=2000)
    options, own = authors.run("sam").data_options, ours.run("sam").data_options
    assert options == dataclasses.replace(
        own, crop_border="reflect", crop_per="batch", cutout_probability=0.5, cutout_fill="black"
    )
    expected = {"vgg16-bn": {"hidden": [512, 512], "dropout": 0.5}, "pyramidnet110": {"block": "bottleneck"}}
    assert authors.model.options == expected.get(authors.model.name, {})


def test_the_authors_public_code_on_imagenet():
    ours, authors = recipe.load("imagenet/resnet50"), recipe.load("imagenet/resnet50@authors")
    assert (authors.training.epochs, authors.training.batch_size, authors.bases["sgdm"].lr) == (100, 256, 0.1)
    assert authors.run("sgdm").data_options.shorter_side == (256, 480)
    assert authors.optimizer.buffers == "probe"
    assert authors.run("llqr-ngd+fsam").probe.lam == 0.6
    assert authors.run("llqr-ngd").geometry == dataclasses.replace(
        ours.run("llqr-ngd").geometry, structure="diagonal", batch_size=256
    )
    run = authors.run("sgdm")
    epoch = run.task_type.steps_per_epoch(run)
    total = run.training.total_steps(epoch)
    assert run.schedule.warmup_steps == 5 * epoch == total // 20
    lrs = [
        run.base.lr * run.schedule.factor(int(epochs * epoch), total) for epochs in (0, 5, 29.9, 30, 69.9, 70, 90, 99)
    ]
    assert lrs == pytest.approx([0.1 / (5 * epoch), 0.1, 0.1, 0.01, 0.01, 1e-3, 1e-4, 1e-4])


def test_the_authors_public_code_on_translation():
    ours, authors = recipe.load(TRANSLATION), recipe.load(f"{TRANSLATION}@authors")
    assert (authors.training.epochs, authors.training.steps, authors.training.batch_size) == (133, None, 16_384)
    assert authors.optimizer == OptimizerSettings(same_dropout=False)
    assert authors.run("llqr-ngd").geometry == dataclasses.replace(
        ours.run("llqr-ngd").geometry, structure="diagonal", every=1000, batch_size=48
    )


def test_settings_of_the_optimizer_reach_it():
    run = recipe.load("digits/mlp", ["optimizer.buffers=probe", "optimizer.same_dropout=false"]).run("sam")
    built = run.build_optimizer(run.build_model(), run.load_task(torch.device("cpu")))
    assert (built._buffers_of_probe, built._same_dropout) == (True, False)
    with pytest.raises(ConfigurationError, match=r"optimizer.buffers must be one of centre, probe, got 'both'"):
        recipe.load("digits/mlp", ["optimizer.buffers=both"])


def test_the_same_experiment_in_two_tables_is_equal():
    plain, synergy = recipe.load("cifar10/resnet18"), recipe.load("fsam-synergy/cifar10/resnet18")
    assert plain.run("sam") == synergy.run("sam")
    assert plain.run("sam") != recipe.load("cifar100/resnet18").run("sam")


def test_a_method_of_the_recipe_comes_before_a_short_name():
    chosen = recipe.load("digits/mlp", ['methods.llqr+sam={base="adam"}'])
    assert (chosen.run("llqr+sam").method, chosen.run("llqr+sam").base.name) == ("llqr+sam", "adam")


def test_aliases_mean_the_natural_gradient():
    loaded = recipe.load("digits/mlp")
    assert loaded.run("llqr") == loaded.run("llqr-ngd")
    assert loaded.run("llqr+sam").to_dict()["method"] == "llqr-ngd+sam"
    with pytest.raises(ConfigurationError, match=r"method must be one of sgdm, .*got 'sgd'"):
        loaded.run("sgd")


def test_the_error_of_a_table_that_may_be_missing_says_what_is_wrong():
    run = recipe.load("digits/mlp").run("sam").to_dict()
    run["probe"]["kind"] = "sammy"
    with pytest.raises(ConfigurationError, match=r"here: run\.probe: kind .*sammy"):
        Run.from_dict(run, "here")


def test_a_probe_gets_the_settings_that_were_made():
    run = recipe.load("cifar100/resnet18").run("llqr-ngd+fsam")
    assert run.probe.arguments() == {"rho": 0.2, "lam": 0.6, "norm": "metric"}
    probe = run.probe.build()
    assert (probe.name, probe.rho, probe.lam, probe.norm, probe.start_after) == ("fsam", 0.2, 0.6, "metric", 0)


def test_every_option_of_the_core_can_be_set_in_a_recipe():
    """The fields of `llqr.Inner` and `llqr.Runtime` are read as they are; a new one needs no line in the laboratory."""
    overrides = ["solver=adam", "steps=7", "clip=2"]
    runtime = ["engine=finite-differences", "apply_dtype=bfloat16", "max_side=64", "micro_batch=16"]
    loaded = recipe.load(
        "digits/mlp",
        [
            *(f"geometries.ngd.inner.{override}" for override in overrides),
            *(f"geometries.ngd.runtime.{override}" for override in runtime),
            "geometries.ngd.structure=diagonal",
            "geometries.ngd.bounds=[1e-3, 10]",
            "geometries.ngd.damping=0.5",
        ],
    )
    settings = loaded.run("llqr").geometry
    assert settings.inner == llqr.Inner("adam", steps=7, lr=1e-3, clip=2.0)
    expected = {"engine": "finite-differences", "max_side": 64, "micro_batch": 16}
    assert settings.runtime == llqr.Runtime(apply_dtype=torch.bfloat16, **expected)
    assert (settings.bounds, settings.damping) == ((1e-3, 10.0), 0.5)
    run = loaded.run("llqr")
    model = run.build_model()
    geometry = run.build_optimizer(model, run.load_task(torch.device("cpu"))).geometry
    assert (geometry.inner, geometry.runtime) == (settings.inner, settings.runtime)


@pytest.mark.parametrize("method", ["sgdm", "llqr-ngd+fsam", "llqr-newton"])
def test_a_run_written_down_is_read_back(method):
    run = recipe.load("digits/mlp", ["geometries.ngd.runtime.apply_dtype=bfloat16"]).run(method)
    assert Run.from_dict(json.loads(json.dumps(plain(run.to_dict()))), "config.json") == run


def test_what_the_execution_decides_is_not_written_down_with_a_run():
    runtime = recipe.load("digits/mlp").run("llqr").to_dict()["geometry"]["runtime"]
    assert not {"capture", "compile", "autocast"} & runtime.keys()
    assert {"engine", "max_side"} <= runtime.keys()


def test_precision_and_execution_reach_the_geometry():
    run = recipe.load("digits/mlp", ["training.precision=bf16"]).run("llqr")
    model, task = run.build_model(), run.load_task(torch.device("cpu"))
    runtime = run.build_optimizer(model, task, compile=True).geometry.runtime
    assert (runtime.autocast, runtime.compile, runtime.engine) == (torch.bfloat16, True, "linearised")
    in_pieces = recipe.load("digits/mlp", ["geometries.ngd.runtime.micro_batch=16"]).run("llqr")
    assert in_pieces.build_optimizer(model, task, compile=True).geometry.engine == "auto"


def test_the_demo_recipe_builds_and_reads_what_it_names():
    run = recipe.load("digits/mlp").run("sgdm")
    held = data.load(run.data.name, run.data.root, run.data_options)
    declared = data.source("digits").model_arguments(run.data_options)
    assert held.train.images.shape[1:] == (declared["image_size"], declared["image_size"], declared["channels"])
    assert held.train.labels.unique().numel() == declared["classes"]
    images, _ = next(iter(held.test_batches(4)))
    assert run.build_model()(images).shape == (4, 10)


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("training.epochs=3", 3),
        ("bases.sgdm.lr=1", 1.0),
        ("bases.sgdm.lr = 1e-2", 0.01),
        ("bases.sgdm.nesterov=true", True),
        ("data.root=/some/where", "/some/where"),
        ('data.root="4"', "4"),
        ("geometries.ngd.structure=e-kfac", "e-kfac"),
        ("geometries.ngd.inner.curvature_scale=mean", "mean"),
        ("geometries.ngd.inner.curvature_scale=2", 2.0),
        ("geometries.ngd.inner.lr=1", 1.0),
        ("geometries.ngd.bounds=[1, 4]", (1.0, 4.0)),
        ("geometries.ngd.runtime.dtype=float64", torch.float64),
        ('columns=["sam"]', ("sam",)),
        ("methods.llqr-ngd+sam.transport=false", False),
        ("model.options.width=16", 16),
        ("data.options.label_noise=0.5", 0.5),
    ],
)
def test_overrides_reach_their_key_with_its_type(override, value):
    loaded = recipe.load("cifar100/resnet18", [override])
    found = loaded
    for part in override.partition("=")[0].strip().split("."):
        found = found[part] if isinstance(found, dict) else getattr(found, part)
    assert found == value
    assert type(found) is type(value)


def test_overrides_come_after_the_variant_and_in_order():
    loaded = recipe.load("cifar100/resnet18@short", ["training.epochs=3", "training.epochs=4"])
    assert loaded.training.epochs == 4


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.epoch=3", r"^cifar100/resnet18: unknown key training.epoch; known here: epochs, "),
        ("trainning.epochs=3", r"unknown key trainning; known here: title, "),
        ("training.epochs=3.5", r"^cifar100/resnet18: training.epochs must be an integer, got 3.5"),
        ("training.epochs=many", r"training.epochs must be an integer, got 'many'"),
        ("training.epochs=0", r"training: epochs must be at least 1, got 0"),
        ("training.epochs=true", r"training.epochs must be an integer, got True"),
        ("bases.sgdm.lr=fast", r"bases.sgdm.lr must be a number, got 'fast'"),
        ("bases.sgdm.name=lion", r"bases.sgdm.name must be one of sgd, adam, adamw, got 'lion'"),
        ("bases.adam.momentum=0.9", r"bases.adam: momentum and nesterov belong to sgd"),
        ("training=3", r"training must be a table, got 3"),
        ("columns=sam", r"columns must be a list, got 'sam'"),
        ('columns=["lbfgs"]', r"columns must be some of sgdm, .*got lbfgs"),
        ("methods.sam.probe=samm", r"methods.sam.probe must be one of sam, fishersam, fsam, .*, got 'samm'"),
        ("probes.sam.lam=0.5", r"probes.sam: lam is no setting of sam"),
        ("probes.fsam.eta=0.5", r"probes.fsam: eta is no setting of fsam"),
        ("probes.sam.kind=same", r"probes.sam: kind must be one of sam, asam, fishersam, fsam, got 'same'"),
        ("geometries.ngd.divergence=kl", r"geometries.ngd: divergence must be one of ngd, newton, got 'kl'"),
        ("geometries.ngd.structure=kfacc", r"geometries.ngd: structure must be one of .*, got 'kfacc'"),
        ("geometries.ngd.damping=[1]", r"geometries.ngd.damping must be a number or a string, got \[1\]"),
        ("geometries.ngd.damping=-1", r"geometries.ngd: damping: expected"),
        ("geometries.ngd.lr=1e-2", r"unknown key geometries.ngd.lr; known here: divergence, .*inner, runtime"),
        ("geometries.ngd.inner.lr=slow", r"geometries.ngd.inner.lr must be a number, got 'slow'"),
        ("geometries.ngd.inner.stepps=3", r"unknown key geometries.ngd.inner.stepps; known here: solver, steps"),
        ("geometries.ngd.inner.solver=bfgs", r"geometries.ngd.inner: solver: unknown 'bfgs'"),
        ("geometries.ngd.bounds=[1]", r"geometries.ngd.bounds must be a list of 2, got \[1\]"),
        ("geometries.ngd.runtime.dtype=float31", r"runtime.dtype must be a torch.dtype, got 'float31'"),
        ("geometries.ngd.runtime.capture=true", r"geometries.ngd: runtime.capture cannot be set .* from --capture"),
        (
            "geometries.ngd.runtime={engine='linearised', compile=true}",
            r"geometries.ngd: runtime.compile cannot be set .* from --compile",
        ),
        ("geometries.ngd.runtime.autocast=bfloat16", r"runtime.autocast cannot be set .* from training.precision"),
        (
            "task.name=captioning",
            r"^cifar100/resnet18: task.name must be one of classification, translation, .*'captioning'",
        ),
        ("bases.adam.betas=[0.9]", r"bases.adam.betas must be a list of 2"),
        ("bases.sgdm.betas=[0.9, 0.98]", r"bases.sgdm: betas belong to adam and adamw"),
        ("schedule.name=inverse-sqrt", r"schedule: warmup_steps must be at least 1 with inverse-sqrt"),
        ("training.evaluate_every=0", r"training: evaluate_every must be at least 1"),
        ("beside=resnet18", r"caveat must say how the row differs"),
        ("task.options.smoothing=0.1", r"unknown key task.options.smoothing; known here: label_smoothing"),
        ("task.options.label_smoothing=1", r"task.options: label_smoothing must lie in"),
        ("data.name=mnist", r"^cifar100/resnet18: data.name: data must be one of digits, .*got 'mnist'"),
        ("data.options.crop=4", r"^cifar100/resnet18: unknown key data.options.crop; known here: crop_padding"),
        ("data.options.cutout=-1", r"data.options: cutout must not be negative"),
        ("model.name=resnet19", r"model must be one of mlp, .*got 'resnet19'"),
        ("model.options.widht=16", r"Model 'resnet18': .*'widht'"),
        ("seeds=0", r"seeds must be at least 1"),
        ("seeds", r"--set must be key=value with a dotted key, got 'seeds'"),
        (".seeds=1", r"--set must be key=value with a dotted key"),
    ],
)
def test_bad_overrides_are_named_and_refused(override, message):
    with pytest.raises(ConfigurationError, match=message):
        recipe.load("cifar100/resnet18", [override])


def test_a_file_of_ones_own_extends_a_built_in_one(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('extends = "cifar10/resnet18"\ntitle = "Mine"\n[probes.sam]\nrho = 0.05\n')
    loaded = recipe.load(path)
    assert loaded.title == "Mine"
    assert loaded.run("llqr-ngd+sam").probe.rho == 0.05
    assert loaded.run("fsam").probe.rho == 0.1
    assert recipe.load(f"{path}@short").training.epochs == 30


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('extends = "cifar10/resnet18"\n[probes.sam]\nrhoo = 1', r"mine.toml: unknown key probes.sam.rhoo"),
        ('extends = "cifar10/resnet18"\n[data.options]\ncrop = 1', r"mine.toml: unknown key data.options.crop"),
        ('extends = "cifar10/resnet18"\n[training]\nepochs = "3"', r"mine.toml: training.epochs must be an integer"),
        ('title = "Mine"', r"mine.toml: seeds is missing"),
        ("title = ", r"mine.toml: Invalid value"),
        (
            'extends = "cifar10/resnet19"',
            r"mine.toml: extends must be one that `llqr recipes` lists or a .toml file, got 'cifar10/resnet19'; "
            r"did you mean cifar10/resnet18\?$",
        ),
        ("extends = 3", r"mine.toml: extends must be the name of a recipe, got 3"),
        ('extends = "nowhere.toml"', r"mine.toml: extends: nowhere.toml: there is no such file"),
    ],
)
def test_errors_name_the_file_that_made_them(tmp_path, text, message):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=message):
        recipe.load(path)


def test_a_missing_key_of_a_component_is_named():
    """rho is left open by the shared protocol, so that a recipe that forgets it does not train."""
    with pytest.raises(ConfigurationError, match=r"protocol/vision: .* is missing"):
        recipe.load("protocol/vision", ['title="x"', "data.name=digits", "model.name=mlp"])


def test_a_file_is_extended_from_the_folder_of_the_one_that_names_it(tmp_path, monkeypatch):
    """Wherever the command is given, also where there is another file of that name."""
    for place, title in ((tmp_path, "beside it"), (tmp_path / "here", "in the current folder")):
        place.mkdir(exist_ok=True)
        (place / "base.toml").write_text(f'extends = "digits/mlp"\ntitle = "{title}"')
    (tmp_path / "own.toml").write_text('extends = "base.toml"\n')
    monkeypatch.chdir(tmp_path / "here")
    assert recipe.load("../own.toml").title == "beside it"
    (tmp_path / "base.toml").write_text('extends = "here/../own.toml"')
    with pytest.raises(ConfigurationError, match="extends itself"):
        recipe.load("../own.toml")


def test_a_recipe_cannot_extend_itself(tmp_path):
    first, second = tmp_path / "a.toml", tmp_path / "b.toml"
    first.write_text(f'extends = "{second}"')
    second.write_text(f'extends = "{first}"')
    with pytest.raises(ConfigurationError, match="extends itself"):
        recipe.load(first)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.name=a/b", r"data must be the name of a prepared text, got 'a/b'"),
        ("data.options.crop_padding=4", r"unknown key data.options.crop_padding; known here: shapes"),
        ("model.name=gpt", r"model must be one of transformer, got 'gpt'"),
        ("model.options.depth=6", r"Model 'transformer': .*'depth'"),
        ("model.options.heads=5", r"heads must divide width"),
        ("task.options.beam=0", r"task.options: beam must be at least 1"),
        ("task.options.max_length=[1]", r"task.options.max_length must be a list of 2, got \[1\]"),
        ("task.options.max_length=[1, -1]", r"task.options: max_length must be two numbers, neither negative"),
        ("geometries.ngd.structure=[1]", r"geometries.ngd.structure must be a string or a table"),
    ],
)
def test_bad_settings_of_a_translation_are_named_and_refused(override, message):
    with pytest.raises(ConfigurationError, match=message):
        recipe.load(TRANSLATION, [override])


def test_unknown_variants_are_listed():
    with pytest.raises(ConfigurationError, match=r"variant must be one of short, kfac, diagonal, authors, got 'tiny'"):
        recipe.load("cifar10/resnet18@tiny")


def test_every_method_of_a_recipe_is_the_one_that_the_library_builds_by_its_name():
    loaded = recipe.load("digits/mlp")
    task = loaded.run("sgdm").load_task(torch.device("cpu"))
    for method in loaded.methods:
        run = loaded.run(method)
        model = run.build_model()
        built = run.build_optimizer(model, task)
        probe = run.probe.arguments() if run.probe else {}
        named = llqr.build(method, run.base.build(model), geometry=built.geometry, **probe)
        assert type(built.probe) is type(named.probe)
        assert (built.probe is None) or vars(built.probe).keys() == vars(named.probe).keys()
        assert (built.transport, type(built.base)) == (named.transport, type(named.base))
        assert (built.probe and built.probe.name) == (run.probe and run.probe.kind)


def test_the_authors_settings_have_the_budget_of_the_row():
    training = recipe.load("iwslt14/europarl-de-en@authors").training
    assert (training.epochs, training.steps, training.evaluate_every) == (None, 12_000, 3000)
    assert training.batch_size == 16_384
    assert recipe.load("iwslt14/transformer_iwslt_de_en@authors").training.epochs == 133


def test_a_variant_that_counts_in_steps_replaces_the_epochs_of_the_variant_it_extends(tmp_path):
    parent, child = tmp_path / "parent.toml", tmp_path / "child.toml"
    parent.write_text('extends = "digits/mlp"\n[variants.short.training]\nepochs = 2\n')
    child.write_text(f'extends = "{parent}"\n[variants.short.training]\nsteps = 7\n')
    training = recipe.load(f"{child}@short").training
    assert (training.epochs, training.steps) == (None, 7)


@pytest.mark.parametrize("part", ["lengths", "directions"])
def test_a_control_has_the_lengths_or_the_directions_of_the_metric(part):
    """Parameter by parameter; a gradient of zero stays zero."""
    run = recipe.load("digits/mlp", [f"geometries.ngd.part={part}"]).run("llqr-ngd+sam")
    torch.manual_seed(0)
    model = run.build_model()
    geometry = run.geometry.build(model, torch.nn.functional.cross_entropy)
    geometry.refresh((torch.randn(32, 1, 8, 8), torch.randint(10, (32,))))
    parameters = list(model.parameters())
    grads = [torch.randn_like(parameter) for parameter in parameters]
    grads[1].zero_()
    moved, found = llqr.Geometry.transport(geometry, parameters, grads), geometry.transport(parameters, grads)
    assert not torch.equal(moved[0], grads[0])
    for g, Ug, own in zip(grads, moved, found, strict=True):
        direction, length = (g, Ug.norm()) if part == "lengths" else (Ug, g.norm())
        torch.testing.assert_close(own, length * torch.nn.functional.normalize(direction, dim=None))
    assert run.build_optimizer(model, run.load_task(torch.device("cpu"))).geometry.part == part


def test_passes_per_step_are_those_of_the_probe():
    loaded = recipe.load("price/resnet18")
    runs = {method: loaded.run(method) for method in ("sgdm", "sam", "5-rho-0.4", "late-2")}
    assert [run.passes_per_step(78200) for run in runs.values()] == [1, 2, 1.2, 1.25]
