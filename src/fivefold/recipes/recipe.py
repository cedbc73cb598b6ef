"""What a recipe is. No torch is imported before a recipe's functions are called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from fivefold.errors import UsageError
from fivefold.plan import Plan, Provenance
from fivefold.recipes import models

if TYPE_CHECKING:
    from torch import Tensor

    from fivefold.data.images import Transform

__all__ = ["Images", "Recipe"]


class Images(Protocol):
    """A data set of (image, target): channels x height x width, and an index into `classes` or a picture."""

    classes: tuple[str, ...]
    """empty for pictures"""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> tuple[Tensor, Any]: ...


@dataclass(frozen=True)
class Recipe:
    """A complete run: images, what is done to them, and the values of the plan that suit them."""

    name: str
    summary: str
    """one line for lists and `--help`"""
    defaults: Mapping[str, object]
    """dotted plan keys; `train.model` is among them"""
    channels: int
    size: int
    """height and width of the images that the model sees, in pixels"""
    read: Callable[[Path | None, bool, int, Transform], Images]
    """(directory, train, size, transform) to the data set; raises `DataError`"""
    augment: Callable[[int], Transform]
    """size to the transform of training images; random"""
    prepare: Callable[[int], Transform]
    """size to the transform of test images"""
    resizable: bool = False
    """whether another size may be asked for"""
    expects: str = ""
    """what a directory of the user's has to hold; empty if the images come with a package"""
    returns: models.Returns = "classes"
    """what its models return: classes, or pictures to be compared with others"""
    axis: str = "data"
    """axis of the layout for the processes, where nobody chose a layout"""
    baseline: Callable[[Images], str] | None = None
    """test images to a line that tells what is reached without a model"""

    def plan(self) -> Plan:
        """The default plan with this recipe's values."""
        why = Provenance("recipe", self.name)
        return Plan().replace({**self.defaults, "train.recipe": self.name}, why)

    def images(self, directory: Path | None, size: int | None = None) -> tuple[Images, Images]:
        """The data sets to train with and to test with.

        Raises:
            UsageError: a directory is missing or pointless, or the size is not for choice.
            DataError: the directory does not hold the images as it should.
        """
        self.check(directory, size)
        pixels = size or self.size
        return (
            self.read(directory, True, pixels, self.augment(pixels)),
            self.read(directory, False, pixels, self.prepare(pixels)),
        )

    def check_model(self, name: str) -> None:
        """Raise `UsageError` unless there is such a model, and it can be trained by this recipe."""
        if (models.returns(name), models.dims(name)) != (self.returns, 2):
            wanted = "tells classes" if self.returns == "classes" else "returns larger pictures"
            raise UsageError(
                f"the recipe {self.name} needs a model that {wanted}, and {name} does not; valid: "
                f"{', '.join(models.names(self.returns))}"
            )

    def check(self, directory: Path | None, size: int | None) -> None:
        """Raise `UsageError` unless the recipe can make use of such a directory and size."""
        if self.expects and directory is None:
            raise UsageError(f"the recipe {self.name} needs --data DIR; DIR holds {self.expects}")
        if directory is not None and not self.expects:
            raise UsageError(
                f"the recipe {self.name} brings its images along: leave out --data, or choose the recipe "
                "folder for a directory of images"
            )
        if size is not None and not self.resizable and size != self.size:
            raise UsageError(
                f"images of the recipe {self.name} are {self.size} x {self.size}: leave out --size, or "
                "choose a recipe with images of any size: folder or photos"
            )
        if size is not None and size < 8:
            raise UsageError(f"--size {size} is too small; the models need 8 pixels or more")
