"""The exception for mistakes that a user can mend."""

from __future__ import annotations


class UserError(ValueError):
    """A mistake in what the user gave: a configuration key, a path, a name, a setting of the machine.

    ``str(error)`` is what the user reads, in place of a traceback. It holds one line per problem, and
    each line says what is wrong (naming the key or the file), what was expected, the nearest valid name
    where there is one, and what to do. The programs print it as ``error: <line>`` and exit with status 2.
    """

    @property
    def lines(self) -> list[str]:
        """The problems, one per entry."""
        return str(self).splitlines()


class NotFiniteError(UserError):
    """A loss, gradient or weight that is no number any more: the state of the run is not worth saving."""
