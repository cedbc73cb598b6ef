"""Autoencoders of diffusers that encode and decode in tiles, or by turns.

    mesh = ff.start()
    tiled(pipe, mesh)
    image = pipe("a map of the city").images[0]

Weights, configuration and the pipeline stay as they are. What comes back is whole on every rank, and what one
process computes: no borders are blended.
"""

from __future__ import annotations

import inspect
from typing import Any, cast

import torch
from torch import Tensor, nn

from fivefold.errors import UsageError, warn
from fivefold.mesh import Mesh
from fivefold.parallel import ParallelModel, parallelize

__all__ = ["FAMILIES", "tiled"]

FAMILIES = (
    "AutoencoderDC",
    "AutoencoderKL",
    "AutoencoderKLCogVideoX",
    "AutoencoderKLCosmos",
    "AutoencoderKLHunyuanVideo",
    "AutoencoderKLLTXVideo",
    "AutoencoderKLMochi",
    "AutoencoderKLWan",
)
"""classes of diffusers that have been compared with one process"""


def tiled(pipe: Any, mesh: Mesh) -> Any:
    """Let a pipeline's autoencoder compute over a mesh what it would compute in one process. Collective.

    From then on `encode` and `decode` are collective too: all ranks run the pipeline on the same, with the
    same seed. Blending tiles of diffusers' own, which are not exact, are switched off.

    Args:
        pipe: a pipeline of diffusers, whose `vae` is taken, or an autoencoder, see `FAMILIES`.
        mesh: what `fivefold.start` returned: tile axes, `tiles.turns`, or both; nothing else.

    Returns what it was given.

    Raises:
        UsageError: there is no autoencoder of a known family, it is in tiles already, or its parameters wait
            elsewhere until they are used.
        PlanError: the plan's turns do not go with the rest of it.
    """
    vae = pipe if isinstance(pipe, nn.Module) else getattr(pipe, "vae", None)
    known = [one.__name__ for one in type(vae).__mro__ if one.__name__ in FAMILIES]
    if not isinstance(vae, nn.Module) or not known:
        what = f"a {type(vae).__name__}" if vae is not None else "no vae"
        raise UsageError(
            f"tiled was given a {type(pipe).__name__} with {what}: known are {', '.join(FAMILIES)}; of "
            'another net, model.run("decode", z) calls a method in tiles'
        )
    if isinstance(vae, _Tiled):
        raise UsageError(f"this {known[0]} is computed in tiles already: call tiled once")
    layout = mesh.layout
    if layout.data * layout.pipe > 1:
        raise UsageError(
            f"tiled takes a mesh of tile axes alone, not {layout}: give every pipeline a mesh of its own"
        )
    if hasattr(vae, "_hf_hook"):
        raise UsageError(
            "the parameters of the vae are moved as they are used (enable_model_cpu_offload, or a device "
            "map): call tiled on a pipeline that keeps them where they are"
        )
    if getattr(vae, "use_tiling", False):
        warn("diffusers' own tiles, which blend borders, are switched off: these are exact")
        cast(Any, vae).disable_tiling()
    made = type(vae)
    model = parallelize(vae, mesh)
    # Behind a function, where a recording of the autoencoder does not look.
    names = {"_model": property(lambda _: model)}
    names |= {name: getattr(made, name) for name in ("__doc__", "__module__", "__qualname__")}
    vae.__class__ = type(made.__name__, (_Tiled, made), names)
    return pipe


class _Tiled(nn.Module):
    """What takes the place of an autoencoder's own methods, which `encoded` and `decoded` call."""

    _model: ParallelModel

    def encode(self, x: Tensor, return_dict: bool = True) -> Any:
        """See the autoencoder."""
        from diffusers.models.autoencoders import vae
        from diffusers.models.modeling_outputs import AutoencoderKLOutput

        found = _whole(self._model, "encoded", x)
        if self._is("AutoencoderDC"):
            return vae.EncoderOutput(latent=found) if return_dict else (found,)
        kind = vae.DiagonalGaussianDistribution
        if self._is("AutoencoderKLCosmos"):
            kind = vae.IdentityDistribution
        return AutoencoderKLOutput(latent_dist=kind(found)) if return_dict else (kind(found),)

    def decode(self, *args: Any, **kwargs: Any) -> Any:
        """See the autoencoder."""
        from diffusers.models.autoencoders.vae import DecoderOutput

        given = inspect.signature(cast(Any, super()).decode).bind(*args, **kwargs).arguments
        return_dict = given.pop("return_dict", True)
        given.pop("generator", None)  # of no use to those that are known
        found = _whole(self._model, "decoded", **given)
        return DecoderOutput(sample=found) if return_dict else (found,)

    def encoded(self, x: Tensor) -> Tensor:
        """The latent, or the parameters of its distribution."""
        found = cast(Any, super()).encode(x)
        return found.latent if self._is("AutoencoderDC") else found.latent_dist.parameters

    def decoded(self, **given: Any) -> Tensor:
        """The image, or the frames."""
        return cast(Any, super()).decode(**given, return_dict=False)[0]

    def _is(self, family: str) -> bool:
        return any(one.__name__ == family for one in type(self).__mro__)


def _whole(model: ParallelModel, method: str, *args: Tensor, **kwargs: Any) -> Tensor:
    args, kwargs = model.shard((args, kwargs))
    with torch.no_grad():
        found = model.whole(model.run(method, *args, **kwargs))
    return found.view(found.shape)  # a plain tensor, without a note that it is all of an image
