"""Small models of other people's libraries. What torchvision lacks is declared before anything imports it."""

from library_models.schemas import declare

__all__: list[str] = []

declare()
