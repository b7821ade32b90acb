"""The three errors a user can meet, each one sentence: argument, got, expected, remedy."""


class ShapeError(ValueError):
    """A tensor has a wrong shape, device or layout, or an argument a wrong value."""


class DtypeError(TypeError):
    """A tensor has a dtype that its argument does not take."""


class UnsupportedError(NotImplementedError):
    """The request is well formed, but nothing here can run it; names every reason and the nearest supported value."""
