"""Names in a recipe or on the command line: suggestions for misspelt ones, and none that leads out of a folder."""

import pytest

from llqr.lab.cli.app import main
from llqr.lab.config import recipe
from llqr.lab.config.strict import ConfigurationError
from llqr.lab.names import unknown
from llqr.lab.runs.planned import plan


def test_the_sentence_about_an_unknown_name():
    assert unknown("--data", "digitz", ["cifar10", "digits"]) == (
        "--data must be one of cifar10, digits, got 'digitz'; did you mean digits?"
    )
    assert unknown("--data", "mnist", ["digits"]) == "--data must be one of digits, got 'mnist'."


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("compare digits/mlp --set model.name=mpl", "model must be one of mlp, .*, got 'mpl'; did you mean mlp"),
        ("train digits/mpl", "recipe must be .*, got 'digits/mpl'; did you mean digits/mlp"),
        ("train digits/mlp@shart", "digits/mlp: variant must be .*, got 'shart'; did you mean short"),
        ("train digits/mlp --method llqr-ngb", "--method must be .*, got 'llqr-ngb'; did you mean llqr-ngd"),
        ("compare digits/mlp --methods sma", "--methods must be one of .*, got 'sma'; did you mean sam"),
        ("train digits/mlp --set trainning.epochs=1", "unknown key trainning; .*; did you mean training"),
        ("train digits/mlp --set probes.sma.rho=1", "probes.sma.kind is missing; did you mean probes.sam"),
        ("train digits/mlp --set methods.adm.probe=sam", "methods.adm.base is missing; did you mean methods.adam"),
        ("train digits/mlp --set training.precision=bf61", "training.precision must .*; did you mean bf16"),
        ("reproduce imagnet", "TABLE must be one of .*, got 'imagnet'; did you mean imagenet"),
        ("reproduce cifar10 --row resnet81", "--row must be one of .*, got 'resnet81'; did you mean resnet18"),
        ("bench peers --model vit-bb", "--model must be one of .*, got 'vit-bb'; did you mean vit-b"),
        ("table cifar1000 --results .", "TABLE must be one of .*; did you mean cifar100"),
        ("table digits --against samm --results .", "--against must be one of .*; did you mean sam"),
    ],
)
def test_a_misspelt_name_is_answered_with_its_option_and_a_suggestion(arguments, sentence, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(arguments.split())
    err = capsys.readouterr().err
    assert (exit_.value.code, err.count("\n")) == (2, 1)
    with pytest.raises(ConfigurationError, match=rf"{sentence}\?"):
        raise ConfigurationError(err)


def test_a_new_component_that_lacks_a_key_is_not_taken_for_a_misspelt_one():
    with pytest.raises(ConfigurationError, match=r"probes\.mine\.kind is missing\.$"):
        recipe.load("digits/mlp", ["probes.mine.rho=1"])


@pytest.mark.parametrize("name", ["../../outside", "/abroad", "..", ".", "", "a/b", "a\\b", "a\nb"])
def test_a_method_or_a_variant_cannot_lead_out_of_the_folder(name, tmp_path):
    file = tmp_path / "mine.toml"
    quoted = '"' + name.replace("\\", "\\\\").replace("\n", "\\n") + '"'
    for table in (f'[methods]\n{quoted} = {{ base = "sgdm" }}', f"[variants.{quoted}.training]\nepochs = 1"):
        file.write_text(f'extends = "digits/mlp"\n{table}\n')
        with pytest.raises(ConfigurationError, match=r"methods and variants: each names a folder: it may not be"):
            recipe.load(str(file))


def test_neither_can_the_name_of_a_recipe(tmp_path):
    loaded = recipe.load("digits/mlp")
    for name in ("..", "../x", "/x", "digits/../../x", "digits//mlp"):
        with pytest.raises(ConfigurationError, match="the name of a recipe names a folder"):
            plan(name, loaded, ["sgdm"], [0], tmp_path)


def test_a_folder_of_results_that_is_not_there_is_refused(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["table", "digits", "--results", "nowhere"])
    assert (exit_.value.code, capsys.readouterr().err) == (2, "llqr: --results: there is no folder nowhere.\n")
