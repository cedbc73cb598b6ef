from __future__ import annotations

import pytest
import torch

import fivefold as ff
from fivefold.mesh import Part, attach, part_of
from fivefold.plan import Numerics, Plan, Provenance
from fivefold.train import Arithmetic, precision, settle_precision

CPU = torch.device("cpu")
RECIPE = Plan().replace({"numerics.precision": "bfloat16"}, Provenance("recipe", "digits"))
USER = Plan().replace({"numerics.precision": "bfloat16"}, Provenance("user", "--set"))


@pytest.mark.parametrize(
    ("flags", "plan", "chosen"),
    [
        ({"avx512_bf16"}, RECIPE, "bfloat16"),
        ({"amx_bf16", "avx2"}, RECIPE, "bfloat16"),
        ({"avx2", "avx512f"}, RECIPE, "float32"),
        ({"avx2"}, USER, "bfloat16"),
        ({"avx512_bf16"}, Plan(), "float32"),
    ],
)
def test_a_recipe_gets_bfloat16_only_where_the_processor_has_it(monkeypatch, flags, plan, chosen):
    monkeypatch.setattr(precision, "_cpu_flags", lambda: frozenset(flags))
    with ff.start(plan, device="cpu") as mesh:
        settled = settle_precision(plan, mesh)
    assert settled.numerics.precision == chosen
    if settled != plan:
        assert str(settled.origin("numerics.precision")) == (
            "recipe: 1 of 1 ranks would have to emulate bfloat16"
        )


def test_the_flags_of_this_machine_are_read():
    assert "fpu" in precision._cpu_flags() or not precision.has_bfloat16(CPU)


def test_images_keep_the_note_of_their_part():
    arithmetic = Arithmetic(Numerics(memory_format="channels_last"), CPU)
    part = Part((8, 3, 5, 5), (4, 0, 0, 0))
    images = attach(torch.rand(4, 3, 5, 5), part)
    laid_out = arithmetic.images(images)
    assert laid_out.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(laid_out, images)
    assert part_of(laid_out) == part
    rows = torch.rand(4, 7)
    assert arithmetic.images(rows) is rows, "only images have channels"


def test_plain_settings_change_nothing():
    arithmetic = Arithmetic(Numerics(), CPU)
    images = torch.rand(4, 3, 5, 5)
    assert arithmetic.images(images) is images
    with arithmetic.autocast():
        assert torch.nn.Linear(5, 2)(images).dtype == torch.float32


def test_bfloat16_computes_in_bfloat16():
    with Arithmetic(Numerics(precision="bfloat16"), CPU).autocast():
        assert torch.nn.Linear(5, 2)(torch.rand(4, 5)).dtype == torch.bfloat16
