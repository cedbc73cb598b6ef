from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fivefold import recipes
from fivefold.errors import UsageError


@pytest.mark.parametrize("name", recipes.names())
def test_a_recipe_makes_a_valid_plan_that_names_it(name: str):
    recipe = recipes.get(name)
    plan = recipe.plan()
    assert recipe.name == plan.train.recipe == name
    recipe.check_model(plan.train.model)
    assert str(plan.origin("train.epochs")) == f"recipe: {name}"
    assert plan.origin("comm.backend").kind == "default"


def test_plans_are_made_without_torch():
    code = (
        "import sys; from fivefold import recipes; [recipes.get(n).plan() for n in recipes.names()];"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_digits_are_enlarged_and_normalised():
    train, test = recipes.get("digits").images(None)
    assert (len(train), len(test), len(train.classes)) == (1437, 360, 10)
    pixels = torch.stack([test[i][0] for i in range(len(test))])
    assert pixels.shape == (360, 1, 16, 16)
    assert pixels.dtype == torch.float32
    assert pixels.mean().abs() < 0.05
    assert (pixels.std() - 1).abs() < 0.05
    assert torch.equal(test[5][0], test[5][0]), "test images are not augmented"
    assert len({tuple(train[5][0].flatten().tolist()) for _ in range(20)}) > 3, (
        "training images are"
    )


def test_photos_are_enlarged_from_any_size_and_centred():
    recipe = recipes.get("photos")
    for size in (None, 31):
        train, test = recipe.images(None, size)
        assert train.classes == ()
        for small, picture in (train[3], test[3]):
            assert picture.shape == (3, 2 * (size or 24), 2 * (size or 24))
            assert small.shape[1] * 2 == picture.shape[1]
            assert picture.abs().max() <= 0.5
    assert recipe.baseline is not None
    assert recipe.baseline(test).startswith("bicubic        3"), "a bit more than 30 dB"


@pytest.mark.parametrize(
    ("name", "model", "message"),
    [
        (
            "digits",
            "edsr",
            "digits needs a model that tells classes, and edsr does not; valid: resnet20",
        ),
        ("folder", "unet3d", "folder needs a model that tells classes, and unet3d does not"),
        (
            "photos",
            "unet",
            "photos needs a model that returns larger pictures, and unet does not; valid: edsr",
        ),
        ("photos", "edsr2", "unknown model 'edsr2'; did you mean 'edsr'"),
    ],
)
def test_a_model_that_does_not_fit_the_recipe_is_an_error(name: str, model: str, message: str):
    with pytest.raises(UsageError, match=message):
        recipes.get(name).check_model(model)


@pytest.mark.parametrize(
    ("name", "directory", "size", "message"),
    [
        ("cifar10", None, None, r"needs --data DIR; DIR holds data_batch_1 to .* and test_batch"),
        ("svhn", None, None, r"needs --data DIR; DIR holds train_32x32.mat and test_32x32.mat"),
        ("folder", None, None, r"needs --data DIR; DIR holds pictures as CLASS/NAME.jpg"),
        ("digits", Path("x"), None, r"digits brings its images along: leave out --data"),
        ("digits", None, 64, r"are 16 x 16: leave out --size"),
        ("cifar10", Path("x"), 64, r"are 32 x 32: leave out --size"),
        ("folder", Path("x"), 4, r"--size 4 is too small"),
    ],
)
def test_what_a_recipe_cannot_use_is_an_error(name, directory, size, message):
    with pytest.raises(UsageError, match=message):
        recipes.get(name).images(directory, size)


def test_an_unknown_recipe_is_answered_with_the_nearest_name():
    with pytest.raises(UsageError, match="unknown recipe 'cifar'; did you mean 'cifar10'"):
        recipes.get("cifar")
