"""Fixtures of the engine's tests."""

from tests.engine.accelerated import place  # noqa: F401
